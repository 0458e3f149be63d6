"""Training runs on pipelines: losses, weights, evaluation, checkpoints and traces of one process's run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from danlu.base.errors import UserError
from danlu.checkpoint.convert import save_hf
from danlu.config.load import load
from danlu.config.rules import check_config
from danlu.config.schema import Config
from danlu.model import decoder as decoder_module
from danlu.parallel.schedule import parse_schedule
from danlu.train import loop as loop_module
from danlu.train.build import TABLE
from danlu.train.layout import check_layout
from danlu.train.loop import TrainResult, train
from distributed.pool import RankPool
from tiny import (
    PLAIN,
    T0_SPEC,
    largest_difference,
    last_tensors,
    random_rows,
    read_metrics,
    tiny_config,
    tiny_model,
    write_rows,
)

pytestmark = pytest.mark.timeout(120)
WORDS = (
    "model.num_layers=4", "train.steps=8", "schedule.warmup_steps=3", "optimizer.max_grad_norm=0.5",
    "optimizer.eps=1e-6",
)  # fmt: skip
PP2 = ("parallel.pp=2", "train.micro_batch_size=2")


def run(data: Path, output: Path, *words: str, resume: str = "auto") -> TrainResult:
    """Train (a job for the pool)."""
    return train(tiny_config(data, output, *WORDS, *words), resume=resume)


def resumed(data: Path, output: Path, checkpoint: Path, *words: str) -> TrainResult:
    """Go on from a checkpoint in another folder (a job for the pool)."""
    return run(data, output, *words, resume=str(checkpoint))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_rows: Path) -> Path:
    """One process: 8 steps, two epochs of four, the fourth of 4 rows instead of 8."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(tiny_rows, folder)
    return folder


def check_same(folder: Path, other: Path) -> None:
    """Assert that two runs have the same losses, norms and weights."""
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        ours, theirs = ([record[name] for record in read_metrics(each) if name in record] for each in (folder, other))
        assert ours == pytest.approx(theirs, rel=tolerance)
    assert largest_difference(last_tensors(folder), last_tensors(other)) < 1e-5


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, PP2),
        (2, ("parallel.pp=2", "train.micro_batch_size=8", "parallel.pp_schedule=gpipe")),
        (2, (*PP2, "parallel.pp_schedule=zbv")),
        (2, ("parallel.pp=2", "train.micro_batch_size=1", "parallel.pp_split=[1,3]")),
        (4, ("parallel.pp=4", "train.micro_batch_size=4", "parallel.pp_schedule=zero_bubble")),
        (4, (*PP2, "parallel.tp=2")),
        (4, (*PP2, "parallel.tp=2", "parallel.sp=false", "parallel.pp_schedule=zbv")),
        (4, ("parallel.pp=2", "parallel.tp=2", "train.micro_batch_size=1", "parallel.pp_schedule=interleaved")),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(value).replace("parallel.", ""),
)
def test_br_104_109_a_run_with_short_steps_and_trimmed_rows(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, alone: Path, ranks: int, words: tuple[str, ...]
) -> None:
    """Micro-batches of many lengths, an epoch's last step with fewer of them, tensor parallel peers: the same run."""
    answers = pool.run(ranks, run, tiny_rows, tmp_path / "run", *words)
    assert all(answer.losses == answers[0].losses for answer in answers)
    check_same(tmp_path / "run", alone)
    assert answers[0].losses[8] < answers[0].losses[1]


def tables(data: Path, output: Path, *words: str) -> list[list[Tensor]]:
    """Train with tied embeddings; return this rank's part of the table after each step (a job for the pool)."""
    seen: list[list[Tensor]] = []
    plain = loop_module._Run._step

    def watched(self: Any, *args: Any) -> None:
        plain(self, *args)
        piece = self.built.pieces().get(TABLE)
        seen.append([] if piece is None else [view.clone() for _, view in piece.boxes])

    loop_module._Run._step = watched  # type: ignore[method-assign]
    try:
        run(data, output, "model.tied_embeddings=true", *words)
    finally:
        loop_module._Run._step = plain  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, PP2),
        (2, (*PP2, "parallel.pp_schedule=zero_bubble")),
        (4, ("parallel.pp=4", "train.micro_batch_size=1")),
        (4, (*PP2, "parallel.bucket_cap_mb=0.01")),
        (4, (*PP2, "parallel.zero=1")),
        (4, (*PP2, "parallel.zero=2", "parallel.bucket_cap_mb=0.01")),
        (4, (*PP2, "parallel.zero=3")),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(value).replace("parallel.", ""),
)
def test_br_086_087_092_copies_of_a_tied_table_stay_bit_equal(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, ranks: int, words: tuple[str, ...]
) -> None:
    """After every step the first stage's table is the last's, ranks between have none, weights are one process's."""
    pool.run(1, run, tiny_rows, tmp_path / "alone", "model.tied_embeddings=true")
    seen = pool.run(ranks, tables, tiny_rows, tmp_path / "run", *words)
    stages = 4 if "parallel.pp=4" in words else 2
    first, last = seen[: ranks // stages], seen[-(ranks // stages) :]
    for left, right in zip(first, last, strict=True):
        assert len(left) == len(right) == 8
        for before, after in zip(left, right, strict=True):
            assert before
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(part == [] for rank in seen[ranks // stages : -(ranks // stages)] for part in rank)
    check_same(tmp_path / "run", tmp_path / "alone")


def first_mask(data: Path, output: Path, *words: str) -> list[bool]:
    """Train with dropout; return what the first one on this rank let through (a job for the pool)."""
    masks: list[Tensor] = []

    def drop(x: Tensor, p: float, training: bool) -> Tensor:
        masks.append(functional.dropout(torch.ones_like(x), p, training) > 0)
        return x * masks[-1] / (1 - p)

    class Functional:
        dropout = staticmethod(drop)
        embedding = staticmethod(functional.embedding)

    decoder_module.F = Functional  # type: ignore[assignment, misc]
    try:
        run(data, output, "model.dropout=0.5", *words)
    finally:
        decoder_module.F = functional  # type: ignore[misc]
    mask: list[bool] = masks[0].flatten().tolist()
    return mask


def test_stages_drop_different_numbers(pool: RankPool, tmp_path: Path, tiny_rows: Path) -> None:
    """The first masks of four stages differ from one another, and are the same in the next run."""
    words = ("parallel.pp=4", "train.micro_batch_size=2", "train.steps=1", "schedule.warmup_steps=0")
    masks = pool.run(4, first_mask, tiny_rows, tmp_path / "first", *words)
    assert len({tuple(mask) for mask in masks}) == 4
    assert masks == pool.run(4, first_mask, tiny_rows, tmp_path / "second", *words)


@pytest.mark.parametrize("micro_batch", [1, 3, 16])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_held_out_loss_is_one_process_s(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, micro_batch: int, schedule: str
) -> None:
    """11 rows in 11, 4 and 1 micro-batches, more and fewer than a pipeline's stages: the same numbers on all ranks."""
    other = write_rows(tmp_path / "other", random_rows(11, seed=5))
    words = (f"eval.data={other}", "train.steps=3", "eval.every_steps=2", f"eval.micro_batch_size={micro_batch}")
    (expected,) = pool.run(1, run, tiny_rows, tmp_path / "alone", *words)
    answers = pool.run(2, run, tiny_rows, tmp_path / "run", *words, *PP2, f"parallel.pp_schedule={schedule}")
    for answer in answers:
        assert answer.held_out == pytest.approx(expected.held_out, rel=1e-5)
    check_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, PP2), (1, ())), ((1, ()), (2, PP2)), ((2, PP2), (4, ("parallel.pp=4", "parallel.pp_schedule=zero_bubble")))],
    ids=["pp2 to 1", "1 to pp2", "pp2 to pp4"],
)
def test_a_checkpoint_resumes_on_another_pipeline(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, before: Any, after: Any, tied: str
) -> None:
    """Saved after step 3 on one layout, finished on another: the losses and weights of a run that was not stopped."""
    tie = f"model.tied_embeddings={tied}"
    pool.run(1, run, tiny_rows, tmp_path / "alone", tie)
    (ranks, words), (more_ranks, more_words) = before, after
    saved = tmp_path / "saved"
    pool.run(ranks, run, tiny_rows, saved, tie, *words, "checkpoint.every_steps=3", "checkpoint.keep_last=9")
    checkpoint = saved / "checkpoints" / "step-00000003"
    answers = pool.run(more_ranks, resumed, tiny_rows, tmp_path / "run", checkpoint, tie, *more_words)
    expected = [record["loss"] for record in read_metrics(tmp_path / "alone")][3:]
    for answer in answers:
        assert list(answer.losses.values()) == pytest.approx(expected, rel=1e-5)
    assert largest_difference(last_tensors(tmp_path / "run"), last_tensors(tmp_path / "alone")) < 1e-5


def fine_tuned(data: Path, output: Path, model: Path, *words: str) -> dict[int, float]:
    """Train from an HF folder and return the losses (a job for the pool)."""
    words = (f"model.name={model}", f"data.train={data}", f"train.output={output}", "train.steps=3", *words)
    return train(load(Config, None, [*PLAIN, *words]).config).losses


@pytest.mark.filterwarnings("ignore:.*tokenizer.*")
@pytest.mark.parametrize("tied", [False, True])
def test_hf_weights_are_loaded_into_stages(pool: RankPool, tmp_path: Path, tiny_rows: Path, tied: bool) -> None:
    """Fine-tuning from an HF folder on two stages begins and goes on with one process's losses."""
    model = tiny_model(seed=7, num_layers=4, tied_embeddings=tied)
    save_hf(model, tmp_path / "model")
    (expected,) = pool.run(1, fine_tuned, tiny_rows, tmp_path / "alone", tmp_path / "model")
    for schedule in ("1f1b", "zbv"):
        words = (*PP2, f"parallel.pp_schedule={schedule}")
        for losses in pool.run(2, fine_tuned, tiny_rows, tmp_path / schedule, tmp_path / "model", *words):
            assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("zbv", 2), ("dualpipev", 4)])
def test_a_traced_step(pool: RankPool, tmp_path: Path, tiny_rows: Path, schedule: str, ranks: int) -> None:
    """The trace has every action in the schedule's order, no two at once on a rank, no input before it was made."""
    words = ("model.num_layers=8", f"parallel.pp_schedule={schedule}", "metrics.trace_schedule=2", "train.steps=3")
    pool.run(ranks, run, tiny_rows, tmp_path / "run", "parallel.pp=2", "train.micro_batch_size=1", *words)
    document = json.loads((tmp_path / "run" / "schedule.json").read_text())
    planned = parse_schedule(document["schedule"])
    assert document["step"] == 2
    assert (planned.name, planned.num_ranks) == (schedule, 2)
    assert planned.num_micro_batches == 8 // (ranks // 2)
    ends: dict[str, float] = {}
    for rank, order in zip(document["ranks"], planned.orders, strict=True):
        assert [each["action"] for each in rank["actions"]] == [str(action) for action in order]
        assert tuple(rank["stages"]) == planned.stages_of(rank["rank"])
        times = [each[name] for each in rank["actions"] for name in ("start_seconds", "end_seconds")]
        assert times == sorted(times)
        assert times[0] >= 0
        ends |= {each["action"]: each["end_seconds"] for each in rank["actions"]}
    assert document["step_seconds"] == max(ends.values())
    for name in ("bubble_fraction", "theoretical_bubble_fraction", "ideal_bubble_fraction"):
        assert 0 <= document[name] < 1
    kinds = {(each["stage"], each["kind"]) for each in document["median_seconds"]}
    assert kinds == {(action.stage, action.kind) for order in planned.orders for action in order}
    assert "<svg" in (tmp_path / "run" / "schedule.svg").read_text()
    assert "step 2: measured bubble" in (tmp_path / "run" / "log.txt").read_text()


def test_without_a_trace_there_is_no_file(alone: Path) -> None:
    """Nothing is written that was not asked for."""
    assert not list(alone.glob("schedule.*"))


@pytest.mark.parametrize(
    ("words", "where", "parts"),
    [
        (("pp=6",), "pp:", ("6 stages for 4 blocks", "at most 4 stages")),
        (("pp=3", 'pp_schedule="zbv"'), "pp:", ("6 stages for 4 blocks", "pp x stages a rank")),
        (("pp=2", "pp_virtual=2"), "pp_virtual:", ('"1f1b"', "seen:  2", "legal: 1")),
        (("pp=2", "pp_virtual=1", 'pp_schedule="interleaved"'), "pp_virtual:", ("seen:  1", "legal: 2 or more")),
        (("pp=2", "pp_split=[1,2]"), "pp_split:", ("2 stages, 3 blocks", "2 numbers", "4 blocks")),
        (("pp=2", "pp_split=[1,1,2]"), "pp_split:", ("3 stages, 4 blocks", "2 numbers")),
    ],
)
def test_what_cannot_be_split_is_refused(words: tuple[str, ...], where: str, parts: tuple[str, ...]) -> None:
    """Before any process group exists, with key, what was seen and what is legal."""
    config = tiny_config("data", "out", "train.steps=2", *(f"parallel.{word}" for word in words))
    degrees = check_config(config, config.parallel.pp)
    with pytest.raises(UserError) as caught:
        check_layout(config, replace(T0_SPEC, num_layers=4), degrees, 24)
    text = str(caught.value)
    assert text.startswith(f"parallel.{where}")
    for part in parts:
        assert part in text
