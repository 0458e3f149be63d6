"""What each rank of a layout holds of a model, for tests to put together again."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from danlu.base import env
from danlu.config.load import load
from danlu.config.rules import check_config
from danlu.config.schema import Config
from danlu.parallel.mesh import open_world
from danlu.train import build
from danlu.train.start import open_sources, plan_start
from tiny import PLAIN

Held = dict[str, list[tuple[tuple[int, ...], Tensor]]]
"""Parameter name -> boxes of it: offsets in the whole, values."""


def held_parts(data: Path, *words: str) -> Held:
    """Build the model of a run on this rank's layout and return what is here of each parameter (a job)."""
    settings = [*PLAIN, f"data.train={data}", "train.output=unused", "train.steps=1", *words]
    config = load(Config, None, settings).config
    sources = open_sources(config.data.train, "fail")
    start = plan_start(config.model, sources)
    with open_world(check_config(config, env.ranks().world_size), device="cpu") as world:
        built = build.build_model(config, start, world, 24)
        dist.barrier()  # nobody leaves while another is still connecting
        return {
            name: [(starts, view.clone()) for starts, view in piece.boxes] for name, piece in built.pieces().items()
        }


def assert_held(answers: list[Held], whole: dict[str, Tensor]) -> None:
    """Every box of every rank is that part of the whole tensor, bit for bit, and together they are all of it."""
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for rank, answer in enumerate(answers):
        for name, boxes in answer.items():
            for starts, values in boxes:
                place = tuple(slice(start, start + size) for start, size in zip(starts, values.shape, strict=True))
                assert torch.equal(values, whole[name][place]), f"rank {rank}, {name} at {starts}"
                seen[name][place] = True
    assert [name for name, mask in seen.items() if not mask.all()] == []
