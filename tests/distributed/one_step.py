"""One step's gradients in any layout, put together from the ranks' shards: what the layouts' tests compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from danlu.config.rules import check_config
from danlu.parallel.mesh import World, open_world, sum_over
from danlu.parallel.placement import Piece
from danlu.train import build
from danlu.train.start import plan_start
from danlu.train.step import StepResult as Result
from danlu.train.step import count_tokens, forward_backward, reduce_losses
from tiny import micro_batch, random_rows, tiny_config

ROWS = random_rows(8, seed=3)


@dataclass(frozen=True)
class Share:
    """What a rank knows after one step: the reduced loss, the norm, and the boxes of its shards' gradients."""

    loss: float
    norm: float
    boxes: list[tuple[str, tuple[int, ...], Tensor]]
    shapes: dict[str, tuple[int, ...]]


def step(folder: Path, words: Sequence[str], limit: float = 0.0) -> Share:
    """Return this rank's share of one step on `ROWS`, two micro-batches (a job for the pool)."""
    with Prepared(folder, words) as (world, built, optimizer, forward):
        mine = ROWS[world.data_rank :: world.data_degree]
        half = max(1, len(mine) // 2)
        batches = [micro_batch(rows) for rows in (mine[:half], mine[half:]) if rows]
        own = count_tokens(batches)[0] if world.counts_rows else 0
        targets = int(sum_over(world.group, own)[0])
        total, parts = forward_backward(forward, batches, built.reducer, valid_tokens=targets, device=world.device)
        norm = optimizer.clip(limit)
        boxes = []
        for shard in optimizer.shards:
            assert shard.values.grad is not None
            piece = Piece(optimizer.blocks[shard.name], shard.values.grad, shard.first)
            boxes += [(shard.name, starts, view.clone()) for starts, view in piece.boxes]
        shapes = {name: tuple(piece.shape) for name, piece in built.pieces().items()}
        loss = reduce_losses(Result(total, targets, norm, False, parts), world)["loss"]
        return Share(loss, norm, boxes, shapes)


class Prepared:
    """A world with model, optimizer and forward pass, as `train` builds them."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.config = tiny_config(folder, folder / "run", "train.steps=1", *words)

    def __enter__(self) -> tuple[World, build.Built, build.HybridOptimizer, build.Forward]:
        from danlu.base import env

        config = self.config
        degrees = check_config(config, env.ranks().world_size)
        self.world = open_world(degrees, device="cpu")
        world = self.world.__enter__()
        start = plan_start(config.model, [])
        built = build.build_model(config, start, world, 24)
        optimizer = build.build_optimizer(config, built, world)
        objective = build.build_objective(config, start.spec, world)
        return world, built, optimizer, build.build_forward(config, built, objective, world)

    def __exit__(self, *error: object) -> None:
        self.world.__exit__(*error)  # type: ignore[arg-type]


def whole_gradients(shares: Sequence[Share]) -> dict[str, Tensor]:
    """Put the gradients together; what several ranks hold must be equal, and nothing may be missing."""
    wholes = {name: torch.full(shape, torch.nan) for share in shares for name, shape in share.shapes.items()}
    for share in shares:
        for name, starts, view in share.boxes:
            region = tuple(slice(start, start + size) for start, size in zip(starts, view.shape, strict=True))
            there = wholes[name][region]
            seen = ~torch.isnan(there)
            assert torch.equal(there[seen], view[seen]), f"ranks disagree on {name}"
            wholes[name][region] = view
    assert not [name for name, value in wholes.items() if torch.isnan(value).any()]
    return wholes


def assert_same_step(shares: Sequence[Share], expected: Share) -> None:
    """Assert that the ranks hold together what one process holds alone."""
    gradients, reference = whole_gradients(shares), whole_gradients([expected])
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, reference[name], rtol=2e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    for share in shares:
        assert abs(share.loss / expected.loss - 1) < 1e-6
        assert abs(share.norm / expected.norm - 1) < 1e-5
