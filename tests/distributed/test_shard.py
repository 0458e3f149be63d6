"""ZeRO: the step is one process's, and a rank holds only its share of what is split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from danlu.parallel.data import BucketReducer, ReplicaReducer, plan_buckets
from danlu.parallel.mesh import World, open_world
from danlu.parallel.shard import ShardedGradientReducer, ShardedReducer, local_range
from danlu.train.optimizer import HybridOptimizer
from distributed.one_step import Prepared, Share, assert_same_step, step
from distributed.parity_layouts import FAMILIES
from distributed.pool import RankPool

pytestmark = pytest.mark.timeout(120)
TIED, UNTIED = FAMILIES["gpt2"], FAMILIES["llama"]


@pytest.fixture(scope="module")
def alone(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Share]:
    """One process's step, tied and untied."""
    folder = tmp_path_factory.mktemp("alone")
    return {words: pool.run(1, step, folder, words)[0] for words in (TIED, UNTIED)}


@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "zero=0 bucket_cap_mb=0.002"),
        (2, "zero=1 bucket_cap_mb=0.002"),
        (3, "zero=1"),
        (2, "zero=2 bucket_cap_mb=0.002"),
        (2, "zero=3"),
        (4, "zero=1 dp_replicate=2 dp_shard=2"),
        (4, "zero=2 dp_replicate=2 dp_shard=2"),
        (4, "zero=3 dp_replicate=2 dp_shard=2"),
    ],
)
def test_br_087_089_a_step_is_that_of_one_rank(
    pool: RankPool, tmp_path: Path, alone: Any, model: tuple[str, ...], ranks: int, layout: str
) -> None:
    """Every gradient is the sum over ranks, in one rank's part or in all; a tied table is one parameter."""
    words = (
        *model,
        "train.global_batch_size=24",
        "train.micro_batch_size=1",
        *(f"parallel.{word}" for word in layout.split()),
    )
    shares = pool.run(ranks, step, tmp_path, words)
    assert_same_step(shares, alone[model])


def held(folder: Path, words: Sequence[str]) -> dict[str, int]:
    """Return how many numbers this rank holds of each kind between two steps (a job for the pool)."""
    with Prepared(folder, words) as (_, built, optimizer, _):
        state = sum(value.numel() for entry in optimizer.core.state.values() for value in entry.values() if value.ndim)
        reducer, parameters = built.reducer, [parameter for _, parameter in built.reducer.parameters]
        gradients: dict[int, int] = {}
        for tensor in [parameter.grad for parameter in parameters] + [shard.values.grad for shard in optimizer.shards]:
            if tensor is not None:
                storage = tensor.untyped_storage()
                gradients[storage.data_ptr()] = storage.nbytes() // 4
        return {
            "all": sum(parameter.numel() for parameter in parameters),
            "parameters": sum(local_range(parameter)[0].numel() for parameter in parameters),
            "gradients": sum(gradients.values()),
            "state": state,
            "split": sum(isinstance(parameter, DTensor) for parameter in parameters),
            "buckets": len(reducer.buckets) if isinstance(reducer, BucketReducer) else 0,
        }


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_holds_its_share(pool: RankPool, tmp_path: Path, zero: int) -> None:
    """On 4 ranks: optimizer state from stage 1, gradients from 2, parameters from 3 are a quarter, padding aside."""
    for numbers in pool.run(4, held, tmp_path, (*UNTIED, f"parallel.zero={zero}")):
        whole, quarter = numbers["all"], numbers["all"] / 4
        slack = 4 * 32 * 20  # one row of each parameter, or the tail of each bucket
        assert numbers["state"] == (2 * whole if not zero else pytest.approx(2 * quarter, abs=2 * slack))
        assert numbers["parameters"] == (whole if zero < 3 else pytest.approx(quarter, abs=slack))
        if zero < 2:
            assert numbers["gradients"] >= whole
        else:
            assert numbers["gradients"] <= quarter + slack
        assert (numbers["split"] > 0) is (zero == 3)


class Two(nn.Module):
    """Two weights, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))


def unused(kind: type[BucketReducer], skip_on: list[int]) -> list[tuple[float, float]]:
    """Return the summed gradients where some ranks leave a parameter out, over two steps (a job for the pool)."""
    with open_world(device="cpu") as world:
        model = Two()
        reducer = make(kind, model, world)
        optimizer = HybridOptimizer(
            reducer, group=world.group, learning_rate=0.0, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0, fused=False
        )
        seen = []
        for _ in range(2):
            with reducer.micro_batch(last=True):
                loss = (world.rank + 1.0) * model.used.sum()
                (loss if world.rank in skip_on else loss + 10 * model.unused.sum()).backward()
            sums = {"used": 0.0, "unused": 0.0}
            for shard in optimizer.shards:
                assert shard.values.grad is not None
                sums[shard.name] += float(shard.values.grad.sum())
            reducer.zero()
            seen.append((sums["used"], sums["unused"]))
        return seen


def make(kind: type[BucketReducer], model: nn.Module, world: World) -> BucketReducer:
    named = {0: list(model.named_parameters())}
    if kind is ReplicaReducer:
        return ReplicaReducer(named, world.group, bucket_cap_mb=1e-6)
    assert issubclass(kind, ShardedReducer)
    return kind(named, world.shard_group, world.axis_group("dp_replicate"), bucket_cap_mb=1e-6)


def shard_world(kind: type[BucketReducer], skip_on: list[int]) -> list[tuple[float, float]]:
    """`unused` with the ranks along dp_shard (a job for the pool)."""
    import distributed.test_shard as here
    from danlu.base import env
    from danlu.base.layout import Degrees

    plain, size = here.open_world, env.ranks().world_size
    here.open_world = lambda **options: plain(Degrees(dp_shard=size), **options)
    try:
        return here.unused(kind, skip_on)
    finally:
        here.open_world = plain


@pytest.mark.parametrize("kind", [ReplicaReducer, ShardedReducer, ShardedGradientReducer])
@pytest.mark.parametrize("skip_on", [[], [0], [1], [0, 1]])
def test_br_257_a_parameter_without_a_gradient_is_zero_there(
    pool: RankPool, kind: type[BucketReducer], skip_on: list[int]
) -> None:
    """Ranks that do not use a parameter add nothing and hang nobody; neither does a parameter that none uses."""
    answers = pool.run(2, unused if kind is ReplicaReducer else shard_world, kind, skip_on, timeout=30)
    expected = (5 * (1.0 + 2.0), 3 * 10.0 * (2 - len(skip_on)))
    for step_number in range(2):
        seen = [answer[step_number] for answer in answers]
        total = seen[0] if kind is ReplicaReducer else tuple(map(sum, zip(*seen, strict=True)))
        assert total == pytest.approx(expected)


def order(reverse_on: int) -> list[int]:
    """Return the order in which this rank starts its buckets (a job for the pool)."""
    with open_world(device="cpu") as world:
        weights = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(4)])
        reducer = ReplicaReducer({0: list(weights.named_parameters())}, world.group, bucket_cap_mb=1e-6)
        started: list[int] = []
        plain = reducer.start
        reducer.start = lambda bucket: (started.append(bucket.index), plain(bucket))[1]  # type: ignore[method-assign]
        x = torch.ones(4)
        for weight in list(weights)[::-1] if world.rank == reverse_on else weights:
            x = x * weight
        with reducer.micro_batch(last=True):
            x.sum().backward()
        return started


def test_buckets_start_in_one_order_on_all_ranks(pool: RankPool) -> None:
    """Gradients that come in another order on one rank do not cross its collectives with those of its peers."""
    assert pool.run(2, order, 1) == [[0, 1, 2, 3]] * 2


def test_br_094_a_bucket_is_a_cap_or_one_parameter() -> None:
    """Untied tables of 64 x 32 are never reduced together where the cap is smaller than both."""
    table, head, norm = (
        nn.Parameter(torch.zeros(64, 32)),
        nn.Parameter(torch.zeros(64, 32)),
        nn.Parameter(torch.zeros(32)),
    )
    named = [("embedding", table), ("norm", norm), ("head", head)]
    buckets = plan_buckets(named, bucket_cap_mb=64 * 32 * 4 / 2**20)
    assert max(bucket.numel for bucket in buckets) == 64 * 32
    assert [name for bucket in buckets for name, _ in bucket.members] == ["head", "norm", "embedding"]


def units(folder: Path) -> list[int]:
    """Return how many numbers each unit of ZeRO-3 gathers and reduces at once (a job for the pool)."""
    from torch.distributed.fsdp import FSDPModule

    with Prepared(folder, ("parallel.zero=3", "model.num_layers=3")) as (_, built, _, _):
        (part,) = built.parts.values()
        sizes = []
        for module in part.modules():
            if isinstance(module, FSDPModule):
                group = module._get_fsdp_state()._fsdp_param_group
                sizes.append(sum(each._orig_size.numel() for each in group.fsdp_params) if group else 0)
        return sizes


def test_br_094_a_unit_of_zero_3_is_a_block_or_one_table(pool: RankPool, tmp_path: Path) -> None:
    """Embedding and head of an untied model are reduced apart: the largest unit has V x D numbers or a block's."""
    (sizes, _) = pool.run(2, units, tmp_path)
    block = 2 * 32 + 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 64
    assert max(sizes) <= max(64 * 32, block + 32)
    assert sizes.count(64 * 32) == 2


def expert_step(folder: Path, words: Sequence[str]) -> tuple[int, float]:
    """Return how many different numbers the norm counts, gradients being 1 (a job for the pool)."""
    with Prepared(folder, words) as (_, built, optimizer, _):
        for _, parameter in built.reducer.parameters:
            if parameter.grad is None and not isinstance(parameter, DTensor):
                parameter.grad = torch.ones_like(parameter)
        for shard in optimizer.shards:
            shard.values.grad = torch.ones_like(shard.values)
        whole = sum(torch.Size(piece.shape).numel() for piece in built.pieces().values())
        return whole, optimizer.clip(0.0)


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, ""), (4, "ep=2"), (4, "zero=1 ep=2"), (4, "zero=2 ep=4"), (4, "zero=3 ep=2")]
)
def test_br_021_the_norm_counts_experts_and_the_rest_once(
    pool: RankPool, tmp_path: Path, ranks: int, layout: str
) -> None:
    """Experts on 1, 2 or all of 4 ranks, all gradients 1: the norm is the root of the number of parameters."""
    (whole, _) = pool.run(1, expert_step, tmp_path, FAMILIES["moe"])[0]
    words = (*FAMILIES["moe"], *(f"parallel.{word}" for word in layout.split()))
    for _, norm in pool.run(ranks, expert_step, tmp_path, words):
        assert norm == pytest.approx(whole**0.5, rel=1e-6)


def dtypes(folder: Path, words: Sequence[str]) -> set[torch.dtype]:
    """Return the dtypes of parameters and optimizer state (a job for the pool)."""
    with Prepared(folder, words) as (_, built, optimizer, _):
        state = {value.dtype for entry in optimizer.core.state.values() for value in entry.values()}
        return state | {parameter.dtype for _, parameter in built.reducer.parameters}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_br_038_041_bf16_is_a_compute_dtype_only(pool: RankPool, tmp_path: Path, alone: Any, zero: int) -> None:
    """Parameters and moments are fp32 in every stage, and the loss is near fp32's: logits are not left in bf16."""
    words = (*UNTIED, 'precision.compute_dtype="bf16"', f"parallel.zero={zero}")
    assert set().union(*pool.run(2, dtypes, tmp_path, words)) == {torch.float32}
    for share in pool.run(2, step, tmp_path, words):
        assert share.loss == pytest.approx(alone[UNTIED].loss, rel=1e-3)
        assert {view.dtype for _, _, view in share.boxes} == {torch.float32}
