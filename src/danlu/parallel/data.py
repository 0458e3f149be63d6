"""Gradients summed over ranks, bucket by bucket while the backward pass goes on.

danlu needs the *sum*: each micro-batch loss is already divided by the token count of the whole global batch, so a rank
with few target tokens must not weigh as much as one with many. A parameter's gradient is ready when autograd has
accumulated it; when all of a bucket's are, the bucket is reduced, so that communication hides behind the rest of the
backward pass (Li et al., arXiv:2006.15704). Buckets start in one fixed order on every rank, whatever order the
gradients come in, and what never became ready (a parameter without a gradient) is reduced as zeros at the end: ranks
can neither cross their collectives nor wait for each other.

`Reducer` is the seam, and right for a single rank. `ReplicaReducer` is data parallelism: every rank holds everything
(ZeRO 0). `shard` splits optimizer state, gradients and parameters. Per step and rank an all-reduce of n numbers moves
2 (r - 1) / r * n of them over r ranks; nothing moves before the last micro-batch.

What the optimizer updates is a list of `Shard`: flat ranges of parameters, with the matching ranges of the gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from danlu.base.log import log

Named = Sequence[tuple[str, nn.Parameter]]
LATE = -1
"""The part of parameters whose gradients several parts of the model add to (a tied table on a pipeline's one rank)."""


@dataclass(frozen=True)
class Shard:
    """What this rank updates of one parameter.

    Attributes:
        name: FQN.
        parameter: the module's parameter.
        first: where the shard begins in the flattened local parameter.
        values: the shard itself, a leaf that shares the parameter's memory (or the parameter).
        copies: ranks of the reduce group that update the same numbers.
    """

    name: str
    parameter: nn.Parameter
    first: int
    values: Tensor
    copies: int


class Reducer:
    """Nothing to reduce: gradients stay where autograd leaves them, and every parameter is one shard."""

    def __init__(self, parameters: Named) -> None:
        self.parameters = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Surround one backward pass; after the ``last`` one of a step every gradient is the sum over ranks."""
        yield

    def begin(self) -> None:
        """Announce a pipelined step: many backward passes of many parts, in any order, up to `finish`."""

    def after_backward(self, part: int, *, last: bool) -> None:
        """Say that a backward pass of one part of the model is complete, and whether it was that part's last."""

    def finish(self) -> None:
        """End a pipelined step: every gradient is the sum over ranks."""

    def shards(self) -> list[Shard]:
        """Return what this rank updates."""
        return [Shard(name, parameter, 0, parameter, 1) for name, parameter in self.parameters]

    def gather(self) -> None:
        """Make every rank's parameters whole again after an update of shards."""

    def zero(self) -> None:
        """Forget the gradients."""
        for _, parameter in self.parameters:
            parameter.grad = None

    def release(self) -> None:
        """Let go of what a forward pass without a backward pass has left whole."""


class JointReducer(Reducer):
    """Several reducers of disjoint parameters, as one: experts are summed over other ranks than the rest."""

    def __init__(self, reducers: Sequence[Reducer]) -> None:
        super().__init__([entry for reducer in reducers for entry in reducer.parameters])
        self.reducers = reducers

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Surround one backward pass; after the ``last`` one of a step every gradient is the sum over ranks."""
        with ExitStack() as stack:
            for reducer in self.reducers:
                stack.enter_context(reducer.micro_batch(last=last))
            yield

    def begin(self) -> None:
        """Announce a pipelined step."""
        for reducer in self.reducers:
            reducer.begin()

    def after_backward(self, part: int, *, last: bool) -> None:
        """Say that a backward pass of one part is complete."""
        for reducer in self.reducers:
            reducer.after_backward(part, last=last)

    def finish(self) -> None:
        """End a pipelined step."""
        for reducer in self.reducers:
            reducer.finish()

    def shards(self) -> list[Shard]:
        """Return what this rank updates."""
        return [shard for reducer in self.reducers for shard in reducer.shards()]

    def gather(self) -> None:
        """Make parameters whole again."""
        for reducer in self.reducers:
            reducer.gather()

    def zero(self) -> None:
        """Forget the gradients."""
        for reducer in self.reducers:
            reducer.zero()


class Bucket:
    """Neighbouring parameters, and one flat memory for their gradients (of one dtype), padded to ``multiple``."""

    def __init__(self, members: Named, multiple: int) -> None:
        self.members, self.part, self.index = members, 0, 0
        self.offsets: list[int] = []
        total = 0
        for _, parameter in members:
            self.offsets.append(total)
            total += parameter.numel()
        self.numel = -(-total // multiple) * multiple
        self.waiting = 0

    def flat(self) -> Tensor:
        """Return zeros for everything in the bucket."""
        first = self.members[0][1]
        return torch.zeros(self.numel, dtype=first.dtype, device=first.device)

    def views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its place in ``flat``, in the parameter's shape."""
        for (_, parameter), offset in zip(self.members, self.offsets, strict=True):
            yield parameter, flat[offset : offset + parameter.numel()].view(parameter.shape)


def plan_buckets(parameters: Named, *, bucket_cap_mb: float, multiple: int = 1) -> list[Bucket]:
    """Return buckets of at most ``bucket_cap_mb`` MiB (or one parameter), last parameters first.

    Last first is the order in which a backward pass makes gradients. A bucket holds one dtype and one device.
    """
    buckets: list[Bucket] = []
    members: list[tuple[str, nn.Parameter]] = []
    held = 0
    for name, parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        alike = not members or (members[0][1].dtype, members[0][1].device) == (parameter.dtype, parameter.device)
        if members and (held + size > bucket_cap_mb * 2**20 or not alike):
            buckets.append(Bucket(members, multiple))
            members, held = [], 0
        members.append((name, parameter))
        held += size
    return [*buckets, Bucket(members, multiple)] if members else buckets


class BucketReducer(Reducer):
    """Starts each bucket's reduction as soon as it may; what a reduction is, subclasses say."""

    every_micro_batch = False
    """Whether gradients are reduced in every backward pass and not only in the last of a step."""

    def __init__(self, parts: Mapping[int, Named], *, bucket_cap_mb: float, multiple: int = 1) -> None:
        """Plan the buckets.

        Args:
            parts: parameters by the part of the model (pipeline stage) whose backward pass completes them; `LATE` for
                those that several add to. Without a pipeline there is one part.
            bucket_cap_mb: size of a bucket in MiB.
            multiple: bucket sizes are padded to a multiple of it.
        """
        super().__init__([entry for named in parts.values() for entry in named])
        self.buckets: list[Bucket] = []
        for part, named in parts.items():
            trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
            for bucket in plan_buckets(trained, bucket_cap_mb=bucket_cap_mb, multiple=multiple):
                bucket.part, bucket.index = part, len(self.buckets)
                self.buckets.append(bucket)
        self._active, self._started = False, 0
        for bucket in self.buckets:
            for _, parameter in bucket.members:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def _hook(self, bucket: Bucket):  # type: ignore[no-untyped-def]
        def ready(_: Tensor) -> None:
            if self._active:
                bucket.waiting -= 1
                self._start_ready()

        return ready

    def _start_ready(self) -> None:
        while self._started < len(self.buckets) and self.buckets[self._started].waiting <= 0:
            self.start(self.buckets[self._started])
            self._started += 1

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Surround one backward pass; after the ``last`` one of a step every gradient is the sum over ranks."""
        self._active, self._started = last or self.every_micro_batch, 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.members)
        yield
        if self._active:
            while self._started < len(self.buckets):  # what never became ready
                self.start(self.buckets[self._started])
                self._started += 1
            self._active = False
            self.wait(last=last)

    def after_backward(self, part: int, *, last: bool) -> None:
        """Begin to reduce the part's buckets, where this pass is one that is reduced."""
        if last or (self.every_micro_batch and part != LATE):
            for bucket in self.buckets:
                if bucket.part == part:
                    self.start(bucket)

    def finish(self) -> None:
        """Reduce what several parts added to, and wait for everything."""
        self.after_backward(LATE, last=True)
        self.wait(last=True)

    def start(self, bucket: Bucket) -> None:
        """Begin to reduce a bucket whose gradients are complete."""
        raise NotImplementedError

    def wait(self, *, last: bool) -> None:
        """Wait until all buckets are reduced."""
        raise NotImplementedError


class ReplicaReducer(BucketReducer):
    """Data parallelism: gradients are summed by all-reduce and every rank updates everything."""

    def __init__(self, parts: Mapping[int, Named], group: dist.ProcessGroup, *, bucket_cap_mb: float) -> None:
        super().__init__(parts, bucket_cap_mb=bucket_cap_mb)
        self.group = group
        self._work: list[dist.Work | None] = []
        self._flats = [bucket.flat() for bucket in self.buckets]
        for bucket, flat in zip(self.buckets, self._flats, strict=True):
            for parameter, view in bucket.views(flat):
                parameter.grad = view

    def start(self, bucket: Bucket) -> None:
        """Begin the all-reduce of one bucket."""
        flat = self._flats[bucket.index]
        self._work.append(dist.all_reduce(flat, group=self.group, async_op=True))

    def wait(self, *, last: bool) -> None:
        """Wait for all of them."""
        for work in self._work:
            if work is not None:
                work.wait()
        self._work.clear()

    def shards(self) -> list[Shard]:
        """Return every parameter, updated alike by all ranks of the group."""
        return [Shard(name, parameter, 0, parameter, self.group.size()) for name, parameter in self.parameters]

    def zero(self) -> None:
        """Set the gradients to zero; their memory stays where the buckets are."""
        for flat in self._flats:
            flat.zero_()


def parameter_hash(parameters: Named) -> str:
    """Return a hash of all parameters' names, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in parameters:
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def check_replicas(parameters: Named, group: dist.ProcessGroup) -> bool:
    """Warn where the replicas differ before training, and take those of the group's first rank.

    Replicas that start apart stay apart without a word in frameworks that skip this, and only train worse.
    """
    mine = parameter_hash(parameters)
    hashes: list[str] = [""] * group.size()
    dist.all_gather_object(hashes, mine, group=group)
    different = [rank for rank, other in enumerate(hashes) if other != hashes[0]]
    if different:
        log.warning(
            "initial weights differ on data ranks %s; taking those of data rank 0 (were the seeds different?)",
            different,
        )
        for _, parameter in parameters:
            dist.broadcast(parameter.detach(), group=group, group_src=0)
    return not different
