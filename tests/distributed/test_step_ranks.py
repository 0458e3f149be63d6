"""One step on several data ranks: token weights, norms, bad numbers and different starts are seen by all alike."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from danlu.checkpoint.store import find_checkpoints
from danlu.data.batch import MicroBatch
from danlu.model.decoder import Decoder
from danlu.objective.cross_entropy import Loss
from danlu.parallel.data import Reducer, ReplicaReducer, check_replicas, parameter_hash
from danlu.parallel.mesh import World, open_world, sum_over
from danlu.parallel.seed import set_seed
from danlu.train import loop as loop_module
from danlu.train.optimizer import HybridOptimizer
from danlu.train.step import StepResult, count_tokens, forward_backward, reduce_losses
from distributed.pool import RankPool
from tiny import (
    T0_SPEC,
    Document,
    gradients,
    language_loss,
    last_tensors,
    micro_batch,
    read_metrics,
    tiny_config,
    tiny_model,
)

pytestmark = pytest.mark.timeout(120)


def step(rows: list[list[list[Document]]], changes: dict[str, Any]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the reduced loss and the gradients of one step in which rank r has the rows ``rows[r]``."""
    with open_world(device="cpu") as world:
        model = tiny_model(**changes)
        batches = [micro_batch([row]) for row in rows[world.rank]]
        targets = int(sum_over(world.group, count_tokens(batches)[0])[0])
        loss_sum, parts = one_step(model, batches, targets, world)
        return reduce_losses(StepResult(loss_sum, targets, 0.0, False, parts), world), gradients(model)


def one_step(model: Decoder, batches: list[MicroBatch], targets: int, world: World) -> Any:
    reducer = replicas(model, world)
    return forward_backward(
        partial(language_loss, model), batches, reducer, valid_tokens=targets, device=torch.device("cpu")
    )


def replicas(model: nn.Module, world: World) -> ReplicaReducer:
    return ReplicaReducer({0: list(model.named_parameters())}, world.group, bucket_cap_mb=0.01)


def check_against_one(pool: RankPool, rows: list[list[list[Document]]], **changes: Any) -> float:
    """Assert that all ranks hold one process's loss and gradients, and return that loss."""
    ((loss, expected),) = pool.run(1, step, [[row for rank in rows for row in rank]], changes)
    for reduced, grads in pool.run(len(rows), step, rows, changes):
        assert reduced["loss"] == pytest.approx(loss["loss"], rel=1e-6)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)
    return loss["loss"]


def test_br_002_tokens_weigh_the_same_on_every_rank(pool: RankPool) -> None:
    """5 target tokens on rank 0 and 1 on rank 1: gradients of one process over the 6, each with weight 1/6."""
    check_against_one(pool, [[[[1, 2, 3, 4, 5, 6]]], [[[7, 8]]]])


def test_br_004_the_reported_loss_is_not_scaled_by_the_world(pool: RankPool) -> None:
    """The logged loss on 1, 2 and 4 ranks is one number."""
    rows: list[list[Document]] = [[[1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]], [[10, 11, 12]]]
    whole = check_against_one(pool, [[row] for row in rows])
    assert check_against_one(pool, [rows[:2], rows[2:]]) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("masked_rank", [0, 1])
def test_br_008_a_rank_without_targets_contributes_zero(pool: RankPool, masked_rank: int) -> None:
    """Labels only on the last 3 tokens of the other rank: loss = sum over 3 / 3, no NaN anywhere."""
    rows: list[list[list[Document]]] = [[[([1, 2, 3, 4], [False] * 4)]], [[([5, 6, 7, 8], [False, True, True, True])]]]
    loss = check_against_one(pool, rows if masked_rank == 0 else rows[::-1])
    assert loss > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_br_087_088_a_tied_weight_on_two_ranks(pool: RankPool, ranks: int) -> None:
    """Meta, materialise, initialise, wrap: the tied gradient is the embedding's plus the head's of the global batch."""
    rows: list[list[Document]] = [[[1, 2, 3, 4, 5, 6]], [[7, 8]]]
    tied = pool.run(ranks, tied_gradient, rows)
    untied = pool.run(1, untied_gradients, rows)[0]
    for grad in tied:
        torch.testing.assert_close(grad, untied, rtol=1e-5, atol=1e-6)


def tied_gradient(rows: list[list[Document]]) -> torch.Tensor:
    """Return the tied gradient of a model that was born on meta (a job for the pool)."""
    from dataclasses import replace

    with open_world(device="cpu") as world:
        with torch.device("meta"):
            model = Decoder(replace(T0_SPEC, tied_embeddings=True))
        model.to_empty(device="cpu")
        model.init_weights(0)
        assert model.head_weight_VD is model.embedding.weight
        one_step(model, [micro_batch([row]) for row in rows[world.rank :: world.size]], 6, world)
        assert model.head_weight_VD is model.embedding.weight
        assert model.embedding.weight.grad is not None
        return model.embedding.weight.grad.clone()


def untied_gradients(rows: list[list[Document]]) -> torch.Tensor:
    """Return embedding plus head gradient of an untied model with the same values (a job for the pool)."""
    tied, model = tiny_model(tied_embeddings=True), tiny_model()
    model.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight.detach()})
    batches = [micro_batch([row]) for row in rows]
    reducer = Reducer(list(model.named_parameters()))
    forward_backward(partial(language_loss, model), batches, reducer, valid_tokens=6, device=torch.device("cpu"))
    grads = gradients(model)
    return grads["embedding.weight"] + grads["head.weight"]


class Line(nn.Module):
    """Two weights whose gradients on rank r are ``parts[r]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, part: list[float]) -> torch.Tensor:
        return (self.first * part[0] + self.second * part[1]).sum()


def clipped(parts: list[list[float]], limit: float) -> tuple[float, list[float]]:
    """Return the norm and the clipped gradients (a job for the pool)."""
    with open_world(device="cpu") as world:
        model = Line()
        reducer = replicas(model, world)
        optimizer = HybridOptimizer(
            reducer, group=world.group, learning_rate=1.0, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0, fused=False
        )
        with reducer.micro_batch(last=True):
            model(parts[world.rank]).backward()
        norm = optimizer.clip(limit)
        return norm, [float(value.grad) for value in model.parameters() if value.grad is not None]


def test_br_018_019_the_norm_is_global_and_the_same_on_all_ranks(pool: RankPool) -> None:
    """Gradients (2, 10) and (3, 2) sum to (5, 12): every rank sees norm 13 and clips to 6.5 by the same factor."""
    for norm, grads in pool.run(2, clipped, [[2.0, 10.0], [3.0, 2.0]], 6.5):
        assert norm == pytest.approx(13.0, rel=1e-6)
        assert grads == pytest.approx([2.5, 6.0], rel=1e-5)


def started_apart(seeds: list[int]) -> tuple[str, str]:
    """Return the parameters' hash before and after the check (a job for the pool)."""
    with open_world(device="cpu") as world:
        model = tiny_model(seeds[world.rank])
        before = parameter_hash(list(model.named_parameters()))
        check_replicas(list(model.named_parameters()), world.group)
        return before, parameter_hash(list(model.named_parameters()))


def test_br_224_replicas_that_start_apart_are_found_and_made_equal(pool: RankPool) -> None:
    """Different seeds give different hashes; after the check all ranks hold rank 0's weights."""
    (first, after_first), (second, after_second) = pool.run(2, started_apart, [0, 1])
    assert first != second
    assert after_first == after_second == first
    same = pool.run(2, started_apart, [3, 3])
    assert len({value for pair in same for value in pair}) == 1


def warned(seeds: list[int]) -> list[str]:
    """Return what the check warned about (a job for the pool)."""
    import logging

    from danlu.base.log import log

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        started_apart(seeds)
    finally:
        log.removeHandler(handler)
    return heard


def test_br_224_a_difference_is_warned_about(pool: RankPool) -> None:
    """The warning names the ranks that differ; equal starts are silent."""
    for heard in pool.run(2, warned, [0, 1]):
        assert [text for text in heard if "initial weights differ on data ranks [1]" in text]
    assert pool.run(2, warned, [5, 5]) == [[], []]


def draws(count: int) -> list[float]:
    """Return what this rank's generator gives after the run's seeding (a job for the pool)."""
    with open_world(device="cpu") as world:
        set_seed(7, data_rank=world.data_rank)
        return torch.rand(count).tolist()


def test_ranks_draw_different_random_numbers(pool: RankPool) -> None:
    """Dropout differs between data ranks, and is the same in every run."""
    first, second = pool.run(4, draws, 3), pool.run(4, draws, 3)
    assert first == second
    assert len({tuple(values) for values in first}) == 4


def poisoned(data: Path, output: Path, bad_rank: int, bad_step: int, *words: str) -> tuple[str, dict[int, float]]:
    """Train with a NaN in one rank's loss at one step; return the error's text and the losses (a job for the pool)."""
    from danlu.base import env
    from danlu.base.errors import RunError

    plain, calls = loop_module.forward_backward, iter(range(1, 100))

    def broken(compute_loss: Any, *args: Any, **options: Any) -> Any:
        bad = next(calls) == bad_step and env.ranks().rank == bad_rank

        def compute(batch: MicroBatch) -> Loss:
            loss = compute_loss(batch)
            return Loss(loss.total * (float("nan") if bad else 1.0))

        return plain(compute, *args, **options)

    loop_module.forward_backward = broken  # type: ignore[assignment]
    try:
        result = loop_module.train(tiny_config(data, output, "train.steps=4", *words))
        return "", result.losses
    except RunError as error:
        return str(error), {}
    finally:
        loop_module.forward_backward = plain


def test_br_032_a_nan_on_rank_1_is_skipped_by_both(pool: RankPool, tmp_path: Path, tiny_rows: Path) -> None:
    """NaN only on rank 1 at step 2: both ranks skip it, the record says so, weights stay finite and equal."""
    folder = tmp_path / "run"
    answers = pool.run(2, poisoned, tiny_rows, folder, 1, 2, "train.on_nonfinite=skip")
    assert [text for text, _ in answers] == ["", ""]
    assert [record["skipped"] for record in read_metrics(folder)] == [0, 1, 0, 0]
    assert all(bool(value.isfinite().all()) for value in last_tensors(folder).values())
    log = (folder / "log.txt").read_text()
    assert "update skipped on all ranks" in log
    assert "data rank 1: loss nan" in log
    assert "data rank 0: loss" not in log


def test_br_032_037_by_default_both_stop_and_name_rank_1(pool: RankPool, tmp_path: Path, tiny_rows: Path) -> None:
    """The default policy stops every rank at step 2 with the culprit's rank; nothing of that step is saved."""
    folder = tmp_path / "run"
    answers = pool.run(2, poisoned, tiny_rows, folder, 1, 2, "checkpoint.every_steps=1")
    for text, _ in answers:
        assert "not finite at step 2" in text
        assert "data rank 1: loss nan" in text
        assert "data rank 0:" not in text
    assert [path.name for path in find_checkpoints(folder / "checkpoints")] == ["step-00000001"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_br_025_a_nan_on_one_rank_is_skipped_whatever_is_split(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, zero: int
) -> None:
    """Bad numbers in rank 1's loss only: all skip the step, and no shard keeps anything of it."""
    for stage in (0, zero):
        words = ("train.on_nonfinite=skip", f"parallel.zero={stage}")
        pool.run(2, poisoned, tiny_rows, tmp_path / str(stage), 1, 2, *words)
    assert [record["skipped"] for record in read_metrics(tmp_path / str(zero))] == [0, 1, 0, 0]
    found, expected = (last_tensors(tmp_path / str(stage), "") for stage in (zero, 0))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not name.startswith("rng."):
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7, msg=f"zero={zero}, {name}")
