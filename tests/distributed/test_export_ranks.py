"""Weights in and out of every layout: what is exported does not depend on who trained it, nor what is imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from danlu.model.decoder import initial_value
from danlu.train.export import export
from danlu.train.load import load_model
from danlu.train.loop import train
from distributed.held import assert_held, held_parts
from distributed.pool import RankPool
from tiny import tiny_config

STILL = ("optimizer.learning_rate=1e-30", "train.steps=1", "train.micro_batch_size=2", "model.vocab_size=65")
"""A step whose updates are smaller than the last bit of any weight: all layouts end with the same ones."""
TIED = ("model.tied_embeddings=true", "model.num_layers=4")


def run(data: Path, output: Path, *words: str) -> None:
    """Train one step (a job for the pool)."""
    train(tiny_config(data, output, *STILL, *words))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_rows: Path) -> dict[bool, Path]:
    """One process's runs and exports, untied and tied."""
    folder = tmp_path_factory.mktemp("alone")
    for tied in (False, True):
        run(tiny_rows, folder / f"run-{tied}", *(TIED if tied else ()))
        export(folder / f"run-{tied}", folder / f"hf-{tied}", verify=False)
    return {tied: folder / f"hf-{tied}" for tied in (False, True)}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ("parallel.tp=2",)),
        (2, ("parallel.zero=3",)),
        (2, ("parallel.pp=2",)),
        (4, ("parallel.cp=2", "parallel.tp=2")),
        (4, ("parallel.pp=4", *TIED)),
    ],
    ids=["tp=2", "zero=3", "pp=2", "cp=2 x tp=2", "pp=4 tied"],
)
def test_br_092_exports_of_every_layout_are_the_same_bytes(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, alone: dict[bool, Path], ranks: int, words: tuple[str, ...]
) -> None:
    """Same weights, so the same files as from one process; a tied table of a pipeline of four is there once."""
    pool.run(ranks, run, tiny_rows, tmp_path / "run", *words)
    export(tmp_path / "run", tmp_path / "hf", verify=False)
    expected = alone["model.tied_embeddings=true" in words]
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == names
    for name in names:
        assert (tmp_path / "hf" / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ()),
        (2, ("parallel.tp=2",)),
        (4, ("parallel.tp=4", "parallel.sp=false")),
        (4, ("parallel.zero=3", "parallel.tp=2")),
        (4, ("parallel.pp=4", *TIED)),
    ],
    ids=["one process", "tp=2", "tp=4", "zero=3 x tp=2", "pp=4 tied"],
)
def test_br_082_092_a_folder_is_read_by_every_layout(
    pool: RankPool, tiny_rows: Path, alone: dict[bool, Path], ranks: int, words: tuple[str, ...]
) -> None:
    """What the ranks hold together is the file, bit for bit; of a tied table only the pipeline's ends have a copy."""
    tied = "model.tied_embeddings=true" in words
    layout = [word for word in words if word.startswith("parallel.")]
    answers = pool.run(ranks, held_parts, tiny_rows, f"model.name={alone[tied]}", *layout)
    whole = {name: value.detach() for name, value in load_model(alone[tied], device="cpu").model.named_parameters()}
    assert_held(answers, whole)
    if tied:
        assert ["embedding.weight" in answer for answer in answers] == [True, False, False, True]
        assert [len(answer["embedding.weight"]) for answer in (answers[0], answers[3])] == [1, 1]
        assert torch.equal(answers[0]["embedding.weight"][0][1], answers[3]["embedding.weight"][0][1])


def test_the_step_moves_nothing(alone: dict[bool, Path]) -> None:
    """What the layouts are compared by really leaves the initial weights as they are."""
    model = load_model(alone[False], device="cpu").model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, initial_value(model.spec, name, parameter.shape, 0)), name
