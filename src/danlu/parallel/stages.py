"""Which layers each pipeline stage holds: the split that makes the slowest stage fastest.

A stage is a range of consecutive blocks; the first also looks tokens up (free: no arithmetic), the last also has the
head, which costs as much as several blocks where the vocabulary is large (for Qwen2.5-0.5B a third of all arithmetic).
Giving every stage the same number of blocks makes the last one the bottleneck of every step, and all others wait for
it. Here the costs are FLOPs of forward and backward per token; the split minimises the largest stage, and among those
the sum of squares, so that what is left over spreads evenly.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from danlu.base.errors import UserError
from danlu.model.spec import ModelSpec


def layer_costs(spec: ModelSpec, sequence_length: int) -> tuple[list[float], float]:
    """Return the forward FLOPs per token of each block, and of the head."""
    shapes = spec.parameter_shapes()
    costs = []
    for layer in range(spec.num_layers):
        own = [shape for name, shape in shapes.items() if name.startswith(f"blocks.{layer}.") and len(shape) > 1]
        parameters = sum(
            (spec.experts_per_token or 0) * math.prod(shape[1:]) if len(shape) == 3 else math.prod(shape)
            for shape in own
        )
        seen = min(sequence_length / 2, spec.window(layer) or sequence_length)
        costs.append(2 * parameters + 4 * seen * spec.num_heads * spec.head_dim)
    return costs, 2.0 * spec.vocab_size * spec.hidden_size


def plan_stages(
    spec: ModelSpec, num_stages: int, *, sequence_length: int, split: Sequence[int] | None = None
) -> list[range]:
    """Return the blocks of each stage, first stage first; every block is in exactly one.

    Args:
        spec: the whole model.
        num_stages: pipeline ranks times stages a rank.
        sequence_length: tokens of a row, for the cost of attention.
        split: number of blocks of each stage; None finds the best.

    Raises:
        UserError: fewer blocks than stages, or a split that is not one.
    """
    if split is not None:
        _check_split(split, num_stages, spec.num_layers)
        sizes = tuple(split)
    else:
        if num_stages > spec.num_layers:
            raise UserError(
                "a pipeline has at least one block a stage", where="parallel.pp",
                seen=f"{num_stages} stages for {spec.num_layers} blocks",
                legal=f"at most {spec.num_layers} stages (pp x stages a rank)",
            )  # fmt: skip
        blocks, head = layer_costs(spec, sequence_length)
        sizes = _balance((*blocks[:-1], blocks[-1] + head), num_stages)
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _check_split(split: Sequence[int], num_stages: int, num_layers: int) -> None:
    if len(split) != num_stages or sum(split) != num_layers:
        raise UserError(
            "the split does not give every block to one stage",
            where="parallel.pp_split",
            seen=f"{list(split)}: {len(split)} stages, {sum(split)} blocks",
            legal=f"{num_stages} numbers (pp x stages a rank) that add up to {num_layers} blocks",
        )


def _balance(costs: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    """Return the sizes of consecutive groups with the smallest largest sum, then the smallest sum of squares.

    Two searches: the best rest of a split need not be the rest of the best split, as soon as another group is largest.
    """
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    end = len(costs)
    largest = [before[end] - start for start in before[:end]]  # of what begins at each block, as one group
    for groups in range(2, num_stages + 1):
        for start in range(end - groups + 1):
            best = float("inf")
            for cut in range(start + 1, end - groups + 2):
                first = before[cut] - before[start]
                best = min(best, max(first, largest[cut]))
                if first >= best:
                    break
            largest[start] = best
    limit = largest[0]

    @cache
    def fill(start: int, groups: int) -> tuple[float, tuple[int, ...]]:
        if groups == 1:
            rest = before[end] - before[start]
            return (rest**2 if rest <= limit else float("inf")), (end - start,)
        best: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for size in range(1, end - start - groups + 2):
            first = before[start + size] - before[start]
            if first > limit:
                break
            squares, sizes = fill(start + size, groups - 1)
            best = min(best, (first**2 + squares, (size, *sizes)))
        return best

    return fill(0, num_stages)[1]
