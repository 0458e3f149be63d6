"""Layer 1: one decoder in plain torch for every supported family, and the values that describe it.

A model is two things here. `spec.ModelSpec` is a frozen value: sizes and choices, nothing that computes. Whoever only
needs to reason about a model (the planner, ``--help``, a config check) imports `spec`, `families` and `presets`, which
import no torch. `decoder.Decoder` turns a spec into parameters and a forward pass; it knows no parallelism, no
optimizer and no loss, and returns hidden states because the objective owns the head.

The trade: one decoder with a handful of ``if`` on the spec instead of one file a family. The families differ in a
dozen yes/no choices (norm, bias, gating, positions), so a copy each would be the same 200 lines six times, and every
later technique (recompute, tensor parallel, adapters) would have to be written six times too. A family that does not
fit into those choices is refused with the list of what is supported; it is never approximated.

This package and `danlu.data` never import each other: they meet in tensors.
"""
