"""Layer 3: run checkpoints and Hugging Face folders."""
