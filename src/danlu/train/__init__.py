"""Layer 4: the recipe, the loop, one step, the optimizer, metrics, evaluation and pipelines of stages."""
