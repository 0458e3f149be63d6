"""Pipelines: every schedule on any number of micro-batches of any lengths computes what one process computes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from danlu.base import env
from danlu.base.layout import Degrees
from danlu.data.batch import MicroBatch
from danlu.model.decoder import Decoder
from danlu.model.spec import ModelSpec
from danlu.objective.cross_entropy import CrossEntropy
from danlu.parallel.data import Reducer
from danlu.parallel.mesh import open_world, sum_over
from danlu.parallel.pipeline import Channels, Pipeline
from danlu.parallel.schedule import SCHEDULES
from danlu.parallel.stages import plan_stages
from danlu.train.build import TABLE
from danlu.train.forward import Forward
from danlu.train.step import count_tokens, forward_backward, forward_backward_pipelined
from distributed.pool import RankPool
from tiny import T0_SPEC, Document, gradients, language_loss, micro_batch
from tiny_models import GPT

pytestmark = pytest.mark.timeout(120)
SPEC = replace(T0_SPEC, num_layers=8)
TIED = replace(SPEC, tied_embeddings=True)
WATCHDOG_SECONDS = 60.0
Rows = list[list[Document]]
Step = list[tuple[Rows, int]]
"""Micro-batches: rows, and the width that they are padded to."""
Outcome = tuple[float, dict[str, Tensor]]


def draw_step(lengths: Sequence[int], seed: int = 0) -> Step:
    """Return one micro-batch a length, each of two rows; one is as long as the micro-batch."""
    draw = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(64) for _ in range(length)]

    return [([[tokens(length)], [tokens(max(2, length // 2)), tokens(2)]], max(length, 4)) for length in lengths]


def make_batches(step: Step) -> list[MicroBatch]:
    return [micro_batch(rows, width=width) for rows, width in step]


class Heard(Channels):
    """Channels that keep dtype and shape of what is sent."""

    sent: list[tuple[torch.dtype, tuple[int, ...]]]

    def send(self, tensor: Tensor, to: int) -> dist.Work:
        self.sent.append((tensor.dtype, tuple(tensor.shape)))
        return super().send(tensor, to)


def steps(
    spec: ModelSpec, name: str, num_virtual: int, work: list[Step], split: list[int] | None = None
) -> tuple[list[Outcome], list[Any]]:
    """Return the loss and this rank's gradients of each step, and what this rank sent (a job for the pool)."""
    with open_world(Degrees(pp=env.ranks().world_size), device="cpu") as world:
        assert world.up is not None
        assert world.down is not None
        channels = Heard(tuple(range(world.size)), world.rank, world.up, world.down)
        object.__setattr__(channels, "sent", [])
        pipeline = Pipeline(channels, schedule=name, num_virtual=num_virtual)
        layers = plan_stages(spec, world.size * num_virtual, sequence_length=24, split=split)
        parts = {stage: Decoder(spec, layers=layers[stage]) for stage in pipeline.stages}
        for part in parts.values():
            part.init_weights(0)
            part.train()
        pipeline.adopt(parts)
        forward = Forward(parts, CrossEntropy(), device=world.device, pipeline=pipeline)
        reducer = Reducer([entry for part in parts.values() for entry in part.named_parameters()])
        outcomes = []
        for step in work:
            batches = make_batches(step)
            valid_tokens = count_tokens(batches)[0]
            loss, _ = forward_backward_pipelined(
                forward, batches, reducer, valid_tokens=valid_tokens, device=world.device
            )
            found = {fqn: grad for part in parts.values() for fqn, grad in gradients(part).items()}
            sent = list(channels.sent)
            peer = pipeline.other_end() if spec.tied_embeddings else None
            if peer is not None:
                channels.sum_with(found[TABLE], peer)
            channels.sent[:] = sent
            reducer.zero()
            outcomes.append((sum_over(world.group, float(loss) / valid_tokens)[0], found))
        return outcomes, channels.sent


def alone(spec: ModelSpec, step: Step) -> Outcome:
    """Return one process's loss and gradients of the whole model."""
    model = Decoder(spec)
    model.init_weights(0)
    model.train()
    batches = make_batches(step)
    reducer, targets = Reducer(list(model.named_parameters())), count_tokens(batches)[0]
    loss, _ = forward_backward(
        partial(language_loss, model), batches, reducer, valid_tokens=targets, device=torch.device("cpu")
    )
    return float(loss) / targets, gradients(model)


def check(
    pool: RankPool,
    ranks: int,
    name: str,
    work: list[Step],
    *,
    num_virtual: int | None = None,
    spec: ModelSpec = SPEC,
    split: list[int] | None = None,
) -> list[list[Any]]:
    """Assert that a pipeline has one process's losses and gradients, each layer somewhere; return what ranks sent."""
    num_virtual = num_virtual or SCHEDULES[name].min_virtual
    expected = [alone(spec, step) for step in work]
    answers = pool.run(ranks, steps, spec, name, num_virtual, work, split, timeout=WATCHDOG_SECONDS)
    for number, (loss, grads) in enumerate(expected):
        names = [fqn for outcomes, _ in answers for fqn in outcomes[number][1]]
        assert set(names) == set(grads), "every parameter has a gradient on some rank"
        twice = {fqn for fqn in names if names.count(fqn) > 1}
        assert twice <= {TABLE}, "and no layer is on two"
        for outcomes, _ in answers:
            assert outcomes[number][0] == pytest.approx(loss, rel=1e-6)
            for fqn, grad in outcomes[number][1].items():
                torch.testing.assert_close(grad, grads[fqn], rtol=1e-4, atol=1e-6, msg=lambda m, f=fqn: f"{f}: {m}")
    return [sent for _, sent in answers]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_br_100_any_number_of_micro_batches(pool: RankPool, name: str, ranks: int) -> None:
    """1, 2, 3, 5 and 8 micro-batches, fewer than stages among them, one step after the other on the same ranks."""
    work = [draw_step([6] * count, seed=count) for count in (1, 2, 3, 5, 8)]
    check(pool, ranks, name, work)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved_zero_bubble"])
def test_br_102_103_111_every_step_and_micro_batch_has_its_own_length(pool: RankPool, name: str) -> None:
    """Steps of 8, 9, 5, 12 tokens, then packed rows of 7, 12, 9 in one step: what arrives is as long as what left."""
    work = [draw_step([length] * 2) for length in (8, 9, 5, 12)] + [draw_step([7, 12, 9])]
    sent = check(pool, 2, name, work)
    lengths = {shape[1] for each in sent for _, shape in each}
    assert lengths == {8, 9, 5, 12, 7}


def test_br_105_two_ranks_that_are_each_others_next_and_previous(pool: RankPool) -> None:
    """Interleaved stages on two ranks, ten random draws of lengths: opposite messages are never swapped."""
    draw = random.Random(3)
    work = [draw_step([draw.randint(3, 14) for _ in range(draw.randint(1, 6))], seed) for seed in range(10)]
    check(pool, 2, "interleaved", work, num_virtual=2)
    check(pool, 2, "interleaved", work[:3], num_virtual=3)


@pytest.mark.parametrize("name", ["gpipe", "zero_bubble"])
def test_br_108_accumulated_gradients_survive_a_change_of_shape(pool: RankPool, name: str) -> None:
    """Lengths 8, 6, 8 in one step: the gradient is that of all three micro-batches, not of the last."""
    step = draw_step([8, 6, 8])
    check(pool, 2, name, [step])
    whole, last = alone(SPEC, step)[1], alone(SPEC, step[-1:])[1]
    assert not torch.allclose(whole["embedding.weight"], last["embedding.weight"], rtol=0.1), "the test can fail"


def test_br_110_only_hidden_states_and_their_gradients_travel(pool: RankPool) -> None:
    """Token ids, positions and documents are on every rank already: floats [B, S, D] move, one each way and batch."""
    sent = check(pool, 4, "1f1b", [draw_step([6, 7, 8])])
    for place, each in enumerate(sent):
        assert {dtype for dtype, _ in each} == {torch.float32}
        assert {(shape[0], shape[2]) for _, shape in each} == {(2, SPEC.hidden_size)}
        assert len(each) == 3 * ((place < 3) + (place > 0))


@pytest.mark.parametrize("split", [[5, 3], [1, 7], [7, 1]])
def test_br_097_an_explicit_split_loses_no_layer(pool: RankPool, split: list[int]) -> None:
    """Uneven splits on two ranks: every layer has its gradient, once."""
    check(pool, 2, "1f1b", [draw_step([5, 6, 7])], split=split)


@pytest.mark.parametrize(("ranks", "num_layers"), [(2, 7), (4, 5), (4, 7), (3, 8)])
def test_br_097_a_planned_split_loses_no_layer(pool: RankPool, ranks: int, num_layers: int) -> None:
    """Layers that the stages do not divide, such as 7 on 2: every one has its gradient, once."""
    check(pool, ranks, "1f1b", [draw_step([5, 6])], spec=replace(SPEC, num_layers=num_layers))


@pytest.mark.parametrize(
    ("name", "ranks"), [("1f1b", 2), ("1f1b", 4), ("zbv", 2), ("dualpipev", 4), ("zero_bubble", 4)]
)
def test_br_086_092_a_tied_table_has_the_gradient_of_both_ends(pool: RankPool, name: str, ranks: int) -> None:
    """Embedding part plus head part, whether the ends are on two ranks or, in a V, on one; nobody between has it."""
    check(pool, ranks, name, [draw_step([6] * count) for count in (1, 5)], spec=TIED)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved_zero_bubble"])
def test_gpt_with_learned_positions_biases_and_a_tied_table(pool: RankPool, name: str) -> None:
    """Biases and norms have their gradients where only Linears let weight gradients wait."""
    check(pool, 2, name, [draw_step([6, 9, 4])], spec=replace(GPT, num_layers=4))


@pytest.mark.parametrize(("ranks", "num_virtual"), [(2, 1), (4, 1), (2, 2)])
def test_learned_positions_are_on_the_first_stage_only(ranks: int, num_virtual: int) -> None:
    """The parts' parameters are the model's, each on one stage; a tied table is on the first and the last."""
    spec = replace(GPT, num_layers=5)
    layers = plan_stages(spec, ranks * num_virtual, sequence_length=24)
    with torch.device("meta"):
        names = [[fqn for fqn, _ in Decoder(spec, layers=each).named_parameters()] for each in layers]
        whole = [fqn for fqn, _ in Decoder(spec).named_parameters()]
    assert [number for number, each in enumerate(names) if "position_embedding.weight" in each] == [0]
    assert [number for number, each in enumerate(names) if TABLE in each] == [0, len(layers) - 1]
    assert sorted(itertools.chain(*names)) == sorted([*whole, TABLE])
