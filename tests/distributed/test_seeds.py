"""Random numbers by axis: what must be equal on two ranks is, what must differ does, and a resumed run draws on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.model.decoder import initial_value
from danlu.train.loop import train
from distributed.held import assert_held, held_parts
from distributed.pool import RankPool
from tiny import T0, T0_SPEC, last_tensors, read_metrics, tiny_config


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ()),
        (2, ("parallel.tp=2",)),
        (2, ("parallel.zero=3",)),
        (2, ("parallel.pp=2",)),
        (4, ("parallel.cp=2", "parallel.zero=1")),
        (4, ("parallel.tp=4",)),
        (8, ("parallel.pp=2", "parallel.zero=2", "parallel.tp=2")),
    ],
    ids=lambda value: " ".join(value).replace("parallel.", "") if isinstance(value, tuple) else None,
)
def test_initial_weights_depend_on_the_seed_alone(
    pool: RankPool, tiny_rows: Path, ranks: int, words: tuple[str, ...]
) -> None:
    """What the ranks of any layout start with is, put together, one process's model, bit for bit."""
    answers = pool.run(ranks, held_parts, tiny_rows, *T0, "train.seed=5", *words)
    shapes = T0_SPEC.parameter_shapes()
    assert_held(answers, {name: initial_value(T0_SPEC, name, shape, 5) for name, shape in shapes.items()})


def first_masks(data: Path, output: Path, *words: str) -> list[Tensor]:
    """Train one step and return which hidden states each of the first two dropouts here has let through (a job)."""
    masks: list[Tensor] = []
    plain = F.dropout

    def watched(x: Tensor, p: float, training: bool) -> Tensor:
        if training and len(masks) < 2:
            state = torch.get_rng_state()
            masks.append(plain(torch.ones_like(x), p, training) > 0)
            torch.set_rng_state(state)
        return plain(x, p, training)

    F.dropout = watched
    try:
        settings = ("model.dropout=0.5", "train.steps=1", "checkpoint.save_last=false", "data.trim_padding=false")
        train(tiny_config(data, output, *settings, *words))
    finally:
        F.dropout = plain
    return masks


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("words", "equal"),
    [
        (("parallel.tp=2", "parallel.sp=false"), True),
        (("parallel.tp=2",), False),
        (("parallel.dp_replicate=2",), False),
        (("parallel.zero=3",), False),
        (("parallel.cp=2",), False),
        (("parallel.pp=2",), False),
    ],
    ids=["tp", "tp with sp", "copies", "shards", "context", "stages"],
)
def test_dropout_differs_where_activations_do(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, words: tuple[str, ...], equal: bool
) -> None:
    """Tensor parallel peers with the same activations drop the same ones; every other pair of ranks draws apart."""
    one, other = pool.run(2, first_masks, tiny_rows, tmp_path / "run", *words)
    assert len(one) == len(other) == 2
    for mine, theirs in zip(one, other, strict=True):
        assert 0.4 < float(mine.float().mean()) < 0.6
        assert mine.shape == theirs.shape
        agree = float((mine == theirs).float().mean())
        assert agree == 1.0 if equal else 0.4 < agree < 0.6
    assert 0.4 < float((one[0] == one[1]).float().mean()) < 0.6, "two dropouts of one rank draw apart as well"


def resumable(data: Path, output: Path, checkpoint: Path | None, *words: str) -> None:
    """Train four steps with dropout, from the start or from a checkpoint (a job)."""
    settings = ("model.dropout=0.2", "train.steps=4", "train.micro_batch_size=2", "checkpoint.every_steps=2")
    train(
        tiny_config(data, output, *settings, "checkpoint.keep_last=9", *words),
        resume="auto" if checkpoint is None else str(checkpoint),
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", [("tp=2",), ("tp=2", "sp=false"), ("pp=2",), ("zero=3",), ("cp=2",)], ids=" ".join)
def test_a_resumed_run_draws_on(pool: RankPool, tmp_path: Path, tiny_rows: Path, words: tuple[str, ...]) -> None:
    """The same layout, stopped after two steps: losses, weights, optimizer and random states to the last bit."""
    layout = [f"parallel.{word}" for word in words]
    pool.run(2, resumable, tiny_rows, tmp_path / "whole", None, *layout)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000002"
    pool.run(2, resumable, tiny_rows, tmp_path / "again", checkpoint, *layout)
    losses, again = ([entry["loss"] for entry in read_metrics(tmp_path / name)] for name in ("whole", "again"))
    assert again == losses[2:]
    left, right = last_tensors(tmp_path / "again", ""), last_tensors(tmp_path / "whole", "")
    assert {"rng.0.cpu", "rng.1.cpu"} <= left.keys() == right.keys()
    assert [name for name in right if not torch.equal(left[name], right[name])] == []
