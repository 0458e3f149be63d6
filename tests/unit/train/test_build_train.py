"""What the recipe takes on: memory and time that no small run would miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from danlu.config.schema import Config
from danlu.parallel.data import Bucket, Reducer
from danlu.parallel.mesh import open_world
from danlu.parallel.shard import ShardedReducer
from danlu.train import build, load
from danlu.train.optimizer import HybridOptimizer
from tiny import tiny_model


def test_auto_is_bf16_only_where_cuda_multiplies_it_in_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older devices emulate bf16, slower than fp32; torch counts that as support unless told otherwise."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert build.pick_dtype("auto", torch.device("cuda")) is torch.float32


def test_one_rank_compares_its_weights_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash of all weights takes a copy of them to the host, for nothing where there is no other replica."""
    monkeypatch.setattr(build, "check_replicas", None)
    with open_world(device="cpu") as world:
        assert type(build._build_reducer({0: tiny_model()}, Config(), world)) is Reducer


def test_zero_takes_parameters_over_bucket_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat memory for a bucket is asked for when that of the bucket before is released: no second copy of a model."""
    model = tiny_model()
    named = list(model.named_parameters())
    before = {name: parameter.data_ptr() for name, parameter in named}
    moved: list[int] = []
    plain = Bucket.flat

    def flat(bucket: Bucket) -> Tensor:
        moved.append(sum(parameter.data_ptr() != before[name] for name, parameter in named))
        return plain(bucket)

    monkeypatch.setattr(Bucket, "flat", flat)
    with open_world(device="cpu") as world:
        reducer = ShardedReducer({0: named}, world.group, world.axis_group("dp_replicate"), bucket_cap_mb=0.001)
    sizes = [len(bucket.members) for bucket in reducer.buckets]
    assert len(sizes) > 2
    assert moved[: len(sizes)] == [sum(sizes[:index]) for index in range(len(sizes))]


def test_a_rank_that_owns_nothing_sums_the_norm_where_its_peers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the sum decides its backend: a host tensor on one rank would leave the others waiting."""

    class Nothing(Reducer):
        def shards(self) -> list[Any]:
            return []

    class Seen(Exception):
        pass

    def all_reduce(tensor: Tensor, **_: object) -> None:
        raise Seen(tensor.device.type)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    model = nn.Linear(2, 2, device="meta")
    with open_world(device="cpu") as world:
        monkeypatch.setattr(type(world.group), "size", lambda _: 2)
        optimizer = HybridOptimizer(
            Nothing(list(model.named_parameters())), group=world.group, learning_rate=0.1, beta1=0.9, beta2=0.9,
            eps=1e-8, weight_decay=0.0, fused=False,
        )  # fmt: skip
        with pytest.raises(Seen, match="meta"):
            optimizer.clip(1.0)
        monkeypatch.undo()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_is_read_straight_into_the_wanted_dtype(
    dtype: str, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that fits in bf16 is not held in fp32 on the way, and has the same numbers."""
    plain, held = load.fill_from_checkpoint, set()

    def fill(targets: dict[str, Tensor], saved: Any, *rest: Any) -> None:
        held.update(value.dtype for value in targets.values())
        plain(targets, saved, *rest)

    run = make_run(1)
    whole = load.load_model(run, device="cpu").model
    monkeypatch.setattr(load, "fill_from_checkpoint", fill)
    model = load.load_model(run, device="cpu", dtype=dtype).model
    assert held == {load.DTYPES[dtype]}
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(load.DTYPES[dtype]))
