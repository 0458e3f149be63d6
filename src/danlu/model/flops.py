"""Floating-point operations of a training step, as `mfu` and `hfu` count them. Imports no torch.

A multiplication and its addition are two operations. A matrix of P parameters costs 2 P per token forward and 4 P
backward; the embedding is a look-up and costs nothing, the head is a matrix and counts (once, tied or not). Of the
experts only those count that a token is sent to. Attention costs 2 x 2 x S x N x H per token and layer forward (scores
and values), of which a causal model needs half. Norms, activations and the softmax are left out, as is customary (PaLM,
arXiv 2204.02311, appendix B, but for the half).

Rows that hold several documents need less attention than this; `mfu` then counts work that was rightly skipped, and
the difference is small while S is small against 6 D.
"""

from __future__ import annotations

from danlu.model.spec import ModelSpec


def matmul_parameters(spec: ModelSpec) -> int:
    """Return the parameters that take part in a token's matmuls (the head included, tied or not)."""
    matrices = sum(
        (spec.experts_per_token or 0) * shape[1] * shape[2] if len(shape) == 3 else shape[0] * shape[1]
        for name, shape in spec.parameter_shapes().items()
        if len(shape) >= 2 and name not in ("embedding.weight", "position_embedding.weight", "head.weight")
    )
    return matrices + spec.vocab_size * spec.hidden_size


def train_flops_per_token(spec: ModelSpec, sequence_length: int) -> float:
    """Return the model FLOPs of forward and backward per token of a row of ``sequence_length`` tokens.

    Nothing recomputed is counted: this is the numerator of `mfu`.
    """
    attention = sum(
        2 * 2 * min(sequence_length / 2, spec.window(layer) or sequence_length) * spec.num_heads * spec.head_dim
        for layer in range(spec.num_layers)
    )
    return 3 * (2 * matmul_parameters(spec) + attention)
