"""ZeRO: what data parallel ranks hold alike is split over them (Rajbhandari et al., arXiv:1910.02054).

With n parameters in fp32 over r ranks, in bytes of a rank (AdamW holds two moments of 4 bytes a parameter):

    zero   parameters   gradients   optimizer   moved a step (in numbers, per rank, one micro-batch)
    0      4 n          4 n         8 n         2 (r - 1)/r n     all-reduce
    1      4 n          4 n         8 n / r     2 (r - 1)/r n     reduce-scatter, all-gather of updated parameters
    2      4 n          4 n / r     8 n / r     the same with one micro-batch; each further one adds (r - 1)/r n
    3      4 n / r      4 n / r     8 n / r     3 (r - 1)/r n     `full_shard`

In stages 1 and 2 buckets of the flattened parameters are the unit: a rank owns the r-th part of each bucket, so
ranks are equally loaded whatever the shapes; the optimizer sees the flat ranges that fall into its part. Parameters
live in one flat memory a bucket, so that after the update the owners' parts are gathered in place, without a copy.

With more copies (HSDP: dp_replicate x dp_shard), gradients are reduce-scattered inside a copy and the parts then summed
over the copies: the slow links between copies carry 1/r of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from danlu.model.decoder import Decoder
from danlu.parallel.collectives import all_gather, reduce_scatter
from danlu.parallel.data import Bucket, BucketReducer, Named, Reducer, Shard
from danlu.parallel.expert import expert_modules

_IN_FLIGHT = 2
"""Buckets whose gradients may be under way at once under ZeRO-2; more would hold more memory than they hide."""


class ShardedReducer(BucketReducer):
    """ZeRO-1: gradients whole until the last backward pass of a step, the optimizer's state split."""

    def __init__(
        self, parts: Mapping[int, Named], shard_group: dist.ProcessGroup, replicate_group: dist.ProcessGroup, *,
        bucket_cap_mb: float,
    ) -> None:  # fmt: skip
        """Take hold of the parameters: they become views of flat memory.

        Args:
            parts: parameters as in `BucketReducer`, with their values in place.
            shard_group: ranks that split.
            replicate_group: ranks with the same part in other copies.
            bucket_cap_mb: size of a bucket in MiB.
        """
        super().__init__(parts, bucket_cap_mb=bucket_cap_mb, multiple=shard_group.size())
        self.group, self.replicate_group = shard_group, replicate_group
        self.copies = replicate_group.size()
        self.values: list[Tensor] = []
        self.parts = [self._part(bucket) for bucket in self.buckets]
        self._work: list[dist.Work | None] = []
        for bucket in self.buckets:  # one after another: what a bucket replaces is free before the next takes memory
            flat = bucket.flat()
            for parameter, view in bucket.views(flat):
                view.copy_(parameter.detach())
                parameter.data = view
            self.values.append(flat)
        self._hold_gradients()

    def _part(self, bucket: Bucket) -> Tensor:
        first = bucket.members[0][1]
        return torch.zeros(bucket.numel // self.group.size(), dtype=first.dtype, device=first.device)

    def _hold_gradients(self) -> None:
        self._gradients = [bucket.flat() for bucket in self.buckets]
        for bucket, flat in zip(self.buckets, self._gradients, strict=True):
            for parameter, view in bucket.views(flat):
                parameter.grad = view

    def start(self, bucket: Bucket) -> None:
        """Begin the reduce-scatter of one bucket."""
        index = bucket.index
        self._work.append(reduce_scatter(self.parts[index], self._gradients[index], self.group, wait=False))

    def wait(self, *, last: bool) -> None:
        """Wait for all buckets, and sum over the copies after the last backward pass."""
        _wait(self._work)
        if last and self.copies > 1:
            self._work = [dist.all_reduce(part, group=self.replicate_group, async_op=True) for part in self.parts]
            _wait(self._work)

    def shards(self) -> list[Shard]:
        """Return the flat ranges of parameters that fall into this rank's parts, gradients attached."""
        found = []
        for bucket, flat, part in zip(self.buckets, self.values, self.parts, strict=True):
            begin = self.group.rank() * part.numel()
            for (name, parameter), offset in zip(bucket.members, bucket.offsets, strict=True):
                low, high = max(offset, begin), min(offset + parameter.numel(), begin + part.numel())
                if low < high:
                    values = flat[low:high].detach().requires_grad_()
                    values.grad = part[low - begin : high - begin]
                    found.append(Shard(name, parameter, low - offset, values, self.copies))
        return found

    def gather(self) -> None:
        """Gather the updated parts in place."""
        for flat, part in zip(self.values, self.parts, strict=True):
            begin = self.group.rank() * part.numel()
            self._work.append(all_gather(flat, flat[begin : begin + part.numel()], self.group, wait=False))
        _wait(self._work)

    def zero(self) -> None:
        """Set the gradients to zero."""
        for flat in self._gradients:
            flat.zero_()


class ShardedGradientReducer(ShardedReducer):
    """ZeRO-2: gradients are split too; every backward pass adds its reduced parts, whole ones live for a moment."""

    every_micro_batch = True

    def _hold_gradients(self) -> None:
        self._under_way: list[tuple[Tensor, Tensor, Tensor, dist.Work | None]] = []

    def start(self, bucket: Bucket) -> None:
        """Begin the reduce-scatter of one bucket's whole gradients, and let go of them."""
        flat = bucket.flat()
        for parameter, view in bucket.views(flat):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        part = self.parts[bucket.index]
        fresh = torch.empty_like(part)
        self._under_way.append((part, fresh, flat, reduce_scatter(fresh, flat, self.group, wait=False)))
        self._take(_IN_FLIGHT)

    def _take(self, leave: int) -> None:
        while len(self._under_way) > leave:
            part, fresh, _, work = self._under_way.pop(0)
            _wait([work])
            part += fresh

    def wait(self, *, last: bool) -> None:
        """Add what is under way."""
        self._take(0)
        super().wait(last=last)

    def zero(self) -> None:
        """Set the parts to zero."""
        for part in self.parts:
            part.zero_()


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
    works.clear()


class FullShardReducer(Reducer):
    """ZeRO-3: parameters are split as well, by torch's FSDP2, and whole only while a block works with them.

    Units are the blocks; the embedding is one of its own, and the last norm goes with the last block, so that no unit
    is larger than a block or one table of V x D. The head (and an embedding that is tied to it) belongs to the root:
    the objective reads it after the forward pass, so it stays whole until the backward pass has used it.

    Gradients are summed in fp32, not averaged, in every backward pass; over the copies (HSDP) in the last one. In a
    pipelined step parameters and gradients stay whole from a part's first pass to its last, and are reduced once: many
    micro-batches are under way, and gathering for each of them again would cost more than it saves.
    """

    def __init__(
        self, parts: Mapping[int, Decoder], shard_group: dist.ProcessGroup, replicate_group: dist.ProcessGroup, *,
        reshard_after_forward: bool, prefetch: int, device: torch.device,
        expert_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    ) -> None:  # fmt: skip
        """Split the model (on meta) in place, then give memory to what is left of it here; the values are to be filled.

        Args:
            parts: the decoder, or this rank's pipeline stages, after tensor parallelism.
            shard_group: ranks that split.
            replicate_group: ranks with the same part in other copies.
            reshard_after_forward: free a block's whole parameters after its forward pass and gather them again for the
                backward pass; False keeps them (less communication, more memory).
            prefetch: blocks to gather ahead of the one at work.
            device: where the parameters are to live.
            expert_groups: shard and replicate group of the experts, where these are spread over ranks; each layer's are
                then a unit of their own.
        """
        self.copies = replicate_group.size()
        mesh = _shard_mesh(shard_group, replicate_group, device.type)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        self.models = parts
        lends_head = any(model.borrowed_head for model in parts.values())
        for model in parts.values():
            if expert_groups is not None:
                spread = {**options, "mesh": _shard_mesh(*expert_groups, device.type)}
                for experts in expert_modules(model):
                    fully_shard(experts, reshard_after_forward=reshard_after_forward, **spread)
            _split(model, options, reshard_after_forward=reshard_after_forward, prefetch=prefetch, lends=lends_head)
            model.to_empty(device=device)
        super().__init__([entry for model in parts.values() for entry in model.named_parameters()])
        self._shards: list[Shard] = []

    def begin(self) -> None:
        """Keep parameters and gradients whole until `after_backward` says otherwise."""
        for model in self.models.values():
            _set_sync(model, False)

    def after_backward(self, part: int, *, last: bool) -> None:
        """Reduce a part's gradients after its last pass."""
        if last:
            _set_sync(self.models[part], True)
            _reduce_now(self.models[part])

    def finish(self) -> None:
        """Hand the reduced gradients to the shards."""
        self._attach()

    def release(self) -> None:
        """Let go of what a forward pass without a backward pass has left whole."""
        for model in self.models.values():
            for unit in _units(model):
                unit.reshard()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Surround one backward pass; after the ``last`` one of a step every gradient is the sum over ranks."""
        if self.copies > 1:
            for model in self.models.values():
                cast(FSDPModule, model).set_requires_all_reduce(last)
        yield
        if last:
            self._attach()

    def _attach(self) -> None:
        for shard in self._shards:
            gradient = shard.parameter.grad
            shard.values.grad = (
                torch.zeros_like(shard.values) if gradient is None else local_range(gradient)[0].view(-1)
            )

    def shards(self) -> list[Shard]:
        """Return this rank's rows of every parameter, each as a flat range."""
        self._shards = []
        for name, parameter in self.parameters:
            local, first = local_range(parameter)
            if local.numel():
                values = local.detach().view(-1).requires_grad_()
                copies = parameter.device_mesh.size(0) if parameter.device_mesh.ndim > 1 else 1  # type: ignore[attr-defined]
                self._shards.append(Shard(name, parameter, first, values, copies))
        return self._shards

    def zero(self) -> None:
        """Forget the gradients."""
        super().zero()
        for shard in self._shards:
            shard.values.grad = None


def _split(model: Decoder, options: dict[str, Any], *, reshard_after_forward: bool, prefetch: int, lends: bool) -> None:
    """Make the units of one part. A table that another part's head borrows stays whole from forward to backward."""
    if model.embedding is not None and (model.head is not None or not model.is_last):
        fully_shard(model.embedding, reshard_after_forward=reshard_after_forward and not lends, **options)
    blocks = list(model.blocks)
    for block in blocks[:-1]:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    end: list[nn.Module] = [blocks[-1]] if model.final_norm is None else [blocks[-1], model.final_norm]
    fully_shard(end, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    split = cast(list[FSDPModule], blocks)
    for index, unit in enumerate(split):
        unit.set_modules_to_forward_prefetch(split[index + 1 : index + 1 + prefetch])
        unit.set_modules_to_backward_prefetch(split[max(0, index - prefetch) : index][::-1])


def _set_sync(model: Decoder, on: bool) -> None:
    root = cast(FSDPModule, model)
    root.set_is_last_backward(on)
    root.set_reshard_after_backward(on)
    root.set_requires_gradient_sync(on)


def _reduce_now(model: Decoder) -> None:
    """Do what FSDP2 does at the end of a backward pass, for gradients that were complete only after it.

    torch's own pipelining calls the same two functions; there is no public name for them.
    """
    root = FSDPModule._get_fsdp_state(cast(FSDPModule, model))
    for state in root._state_ctx.all_states:
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11 has one a state
        for group in groups:
            if group is not None:
                group.post_backward()
    root._root_post_backward_final_callback()


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def local_range(tensor: Tensor) -> tuple[Tensor, int]:
    """Return what this rank holds of a (possibly FSDP2-split) tensor, and where that begins in the flattened whole."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    local = tensor.to_local()
    ranks, dims = tensor.device_mesh.mesh.shape, tensor.placements
    axis = len(dims) - 1
    assert isinstance(dims[axis], ShardPlacement)
    rows = -(-tensor.shape[0] // ranks[axis])
    # its coordinate and not its rank in a group: torch's caches can hand out an equal mesh of a job that has ended
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    first = min(tensor.shape[0], place[axis] * rows)
    return local, first * (tensor.numel() // max(1, tensor.shape[0]))


def _shard_mesh(shard_group: dist.ProcessGroup, replicate_group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    if replicate_group.size() == 1:
        return DeviceMesh.from_group(shard_group, device_type)
    rows = [None] * replicate_group.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard_group), group=replicate_group)
    return DeviceMesh.from_group(
        [replicate_group, shard_group], device_type, mesh=torch.tensor(rows), mesh_dim_names=("replicate", "shard")
    )
