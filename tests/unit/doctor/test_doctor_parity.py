"""`danlu doctor parity`: what is compared, what is refused, and what is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from danlu.base.errors import UserError
from danlu.cli import doctor_parity as cli
from danlu.config.load import to_toml
from danlu.config.schema import Config
from danlu.doctor import parity as doctor
from danlu.doctor.parity import Parity, Side, as_json, as_text, check_comparable, check_parity, compare_runs
from danlu.train.loop import train
from tiny import tiny_config

WORDS = ("train.steps=3", "train.micro_batch_size=4")
A, B = Side(Path("a.toml"), 2, "tp=2"), Side(Path("b.toml"), 1, "one process")


@pytest.fixture(scope="module")
def runs(tiny_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, the same with accumulation, one that goes wrong from its second step on, and one with key biases."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {
        "whole": ("train.micro_batch_size=8",),
        "parts": (),
        "other": ("schedule.warmup_steps=2",),
        "biased": ('model.name="qwen2.5-0.5b"',),
        "biased-parts": ('model.name="qwen2.5-0.5b"', "train.micro_batch_size=2"),
    }
    for name, words in changes.items():
        train(tiny_config(tiny_rows, folder / name, *WORDS, *words))
    return {name: folder / name for name in changes}


def write(folder: Path, name: str, config: Config) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    return path


def test_accumulation_is_the_same_training(runs: dict[str, Path]) -> None:
    """Two micro-batches or one: distances of rounding, none of them beyond the tolerance, and none exactly ignored."""
    found = compare_runs(runs["parts"], runs["whole"], A, B)
    assert found.same
    assert (found.first_step, found.first_parameter) == (None, None)
    assert list(found.losses) == list(found.grad_norms) == [1, 2, 3]
    assert 0 < max(found.weights.values()) < 1e-5
    assert "the same training over 3 steps" in as_text(found)


def test_a_difference_is_located(runs: dict[str, Path]) -> None:
    """Another learning rate in the first update: the first loss is equal, the second is not; so are all matrices."""
    found = compare_runs(runs["other"], runs["parts"], A, B)
    assert not found.same
    assert found.first_step == 2
    assert found.first_parameter == "embedding.weight"
    text = as_text(found)
    assert "A: a.toml on 2 ranks (tp=2)\nB: b.toml on 1 rank (one process)" in text
    assert "first step beyond what is allowed: 2\nfirst parameter beyond what is allowed: embedding.weight" in text
    document = as_json(found)
    assert document["first_step_beyond"] == 2
    assert document["loss"]["1"] == 0.0
    assert document["loss"]["2"] > 1e-5
    json.dumps(document, allow_nan=False)


def test_key_biases_are_named_and_left_out(runs: dict[str, Path]) -> None:
    """Their gradient is rounding noise: without them accumulation is the same training for a model with biases too."""
    found = compare_runs(runs["biased-parts"], runs["biased"], A, B)
    assert found.left_out == ("blocks.0.attention.key.bias", "blocks.1.attention.key.bias")
    assert "blocks.0.attention.query.bias" in found.weights
    assert found.same
    assert "left out, their gradient is rounding noise: blocks.0.attention.key.bias" in as_text(found)


def test_another_model_is_refused(runs: dict[str, Path]) -> None:
    """Run folders of different models are not compared."""
    with pytest.raises(UserError, match="different models"):
        compare_runs(runs["biased"], runs["whole"], A, B)


def test_a_number_that_is_none_is_beyond_every_tolerance() -> None:
    """An infinite distance is not within, and null in JSON."""
    bad = Parity(A, B, 1e-5, {1: 0.0, 2: float("inf")}, {1: 0.0, 2: 0.0}, {"w": float("nan")})
    assert not bad.same
    assert (bad.first_step, bad.first_parameter) == (2, "w")
    assert as_json(bad)["loss"] == {"1": 0.0, "2": None}
    assert doctor._apart(float("nan"), 1.0) == float("inf")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("train.seed=1",), ["train.seed"]),
        (("model.num_layers=3", "train.global_batch_size=4"), ["model.num_layers", "train.global_batch_size"]),
        (("optimizer.learning_rate=0.1",), ["optimizer.learning_rate"]),
        (("data.shuffle=false",), ["data.shuffle"]),
        (("eval.held_out_fraction=0.2",), ["eval.held_out_fraction"]),
    ],
)
def test_what_no_layout_could_make_alike_is_refused(words: tuple[str, ...], keys: list[str]) -> None:
    """The message lists the keys, with both values."""
    first, second = tiny_config("rows", "a", *WORDS), tiny_config("rows", "b", *WORDS, *words)
    with pytest.raises(UserError, match="do not train the same thing") as error:
        check_comparable(first, second)
    assert error.value.where == ", ".join(keys)
    assert error.value.exit_code == 2


def test_what_may_differ_may_differ() -> None:
    """Layout, accumulation, precision, output, duration, logging."""
    words = (
        "parallel.tp=2", "train.micro_batch_size=1", 'precision.compute_dtype="bf16"', "train.epochs=2",
        "metrics.log_every=5", 'optimizer.fused="off"', "data.num_workers=1",
    )  # fmt: skip
    check_comparable(tiny_config("rows", "a", *WORDS), tiny_config("rows", "b", *words))


def test_dropout_is_refused() -> None:
    """Masks are drawn by rank."""
    config = tiny_config("rows", "a", *WORDS, "model.dropout=0.1")
    with pytest.raises(UserError, match="dropout draws other masks"):
        check_comparable(config, config)


def test_an_open_number_of_ranks_is_asked_for(tmp_path: Path, tiny_rows: Path) -> None:
    """-1 needs a flag; both configs are checked before either is trained."""
    open_config = write(tmp_path, "open", tiny_config(tiny_rows, tmp_path / "run", *WORDS, "parallel.tp=-1"))
    fixed = write(tmp_path, "fixed", tiny_config(tiny_rows, tmp_path / "run", *WORDS))
    with pytest.raises(UserError, match=r"parallel\.tp: the number of ranks is open\n.*-1\n.*--nproc-b N"):
        check_parity(fixed, open_config)
    with pytest.raises(UserError, match="must multiply to the number of processes"):
        check_parity(write(tmp_path, "tp", tiny_config(tiny_rows, "r", *WORDS, "parallel.tp=2")), fixed, nproc_first=3)
    with pytest.raises(UserError, match="--tolerance"):
        check_parity(fixed, fixed, tolerance=0.0)


def test_short_runs_leave_the_users_files_alone(tmp_path: Path, tiny_rows: Path) -> None:
    """Output goes to a temporary folder; steps are those asked for; the rows that are held out stay so."""
    words = ("train.epochs=9", "schedule.warmup_steps=50", "eval.held_out_fraction=0.2", "eval.every_steps=2")
    config = tiny_config(tiny_rows, tmp_path / "mine", *words, "checkpoint.every_steps=1")
    short = doctor._shortened(config, tmp_path / "temporary", 4)
    assert (short.train.steps, short.train.epochs, short.schedule.warmup_steps) == (4, None, 4)
    assert short.train.output == str(tmp_path / "temporary")
    assert (short.eval.held_out_fraction, short.eval.every_steps, short.checkpoint.every_steps) == (0.2, 0, 0)


@pytest.mark.parametrize(("distance", "code"), [(1e-7, None), (1e-3, 1)])
def test_the_exit_code_is_the_verdict(
    distance: float, code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 within the tolerance, 1 beyond it; --json prints one document either way."""
    asked: dict[str, Any] = {}

    def checked(*paths: Path, **options: Any) -> Parity:
        asked.update(options)
        return Parity(A, B, 1e-5, {1: distance}, {1: 0.0}, {"w": 0.0})

    monkeypatch.setattr(doctor, "check_parity", checked)
    arguments: dict[str, Any] = {"config_a": Path("a"), "config_b": Path("b"), "nproc_a": 2, "json": True}
    if code is None:
        cli.command(**arguments)
    else:
        with pytest.raises(typer.Exit) as end:
            cli.command(**arguments)
        assert end.value.exit_code == code
    assert json.loads(capsys.readouterr().out)["same"] is (code is None)
    assert (asked["nproc_first"], asked["nproc_second"]) == (2, None)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_command_compares_two_ranks_with_one(tmp_path: Path, tiny_rows: Path) -> None:
    """Tensor parallelism against one process, through the command: one JSON document, exit code 0, nothing left."""
    config = tiny_config(tiny_rows, tmp_path / "run", *WORDS)
    one = write(tmp_path, "one", config)
    two = write(tmp_path, "two", tiny_config(tiny_rows, tmp_path / "run", *WORDS, "parallel.tp=2"))
    words = ["doctor", "parity", str(two), str(one), "--steps", "3", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "danlu", *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["same"]
    assert (document["a"]["ranks"], document["a"]["layout"], document["b"]["ranks"]) == (2, "tp=2", 1)
    assert 0 < max(document["weights"].values()) < 1e-5
    assert not (tmp_path / "run").exists()
