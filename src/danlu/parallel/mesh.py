"""The ranks of a job: the only module that creates process groups.

Even one process gets a process group (of size 1), so nothing above this layer ever asks whether it is distributed.
CUDA jobs get two backends, NCCL for device tensors and gloo for host tensors: the token count and the stop flag are
agreed on the host, without waiting for the device. Checkpoints get a gloo group of their own, because they are
written by a background thread and two threads must never share a group (their collectives would interleave).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from danlu.base import env
from danlu.base.errors import UserError
from danlu.base.layout import AXES, Degrees
from danlu.base.log import log


@dataclass(frozen=True)
class ExpertGroups:
    """The same ranks, seen from the experts (`Degrees.expert_shape`).

    Attributes:
        group: ranks that experts are spread over (ep).
        reduce_group: ranks that hold the same experts and sum their gradients.
        shard_group: the part of ``reduce_group`` that ZeRO splits over.
        replicate_group: ranks with the same part of the same experts.
    """

    group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup


@dataclass(frozen=True)
class World:
    """This process's place in the job, its device and the groups that it shares with others.

    Attributes:
        degrees: ranks per axis.
        mesh: one dimension an axis, in the order of `layout.AXES`.
        group: all ranks.
        reduce_group: ranks that hold the same parameters and sum their gradients: dp_replicate x dp_shard x cp.
        shard_group: the part of ``reduce_group`` that ZeRO splits over: dp_shard x cp.
        checkpoint_group: all ranks, for the thread that writes checkpoints.
        experts: the ranks by which experts are spread and reduced; None without expert parallelism.
        up: all ranks, for a pipeline's messages to later places; None without a pipeline.
        down: the same to earlier places.
    """

    rank: int
    size: int
    device: torch.device
    degrees: Degrees
    mesh: DeviceMesh
    group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    checkpoint_group: dist.ProcessGroup
    experts: ExpertGroups | None = None
    up: dist.ProcessGroup | None = None
    down: dist.ProcessGroup | None = None

    def place(self, axis: str) -> int:
        """Return this rank's index on one axis."""
        return int(self.mesh.get_local_rank(axis))

    def axis_group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks that differ from this one on ``axis`` only."""
        return self.mesh.get_group(axis)

    @property
    def data_rank(self) -> int:
        """Index over dp_replicate x dp_shard; tp, cp and pp peers have the same and see the same rows."""
        return self.place("dp_replicate") * self.degrees.dp_shard + self.place("dp_shard")

    @property
    def data_degree(self) -> int:
        """Number of data ranks."""
        return self.degrees.data

    @property
    def counts_rows(self) -> bool:
        """Whether this rank speaks for its data rank where rows or tokens are counted over all ranks."""
        return self.place("pp") == self.place("cp") == self.place("tp") == 0

    @property
    def counts_losses(self) -> bool:
        """Whether this rank's losses count: tensor parallel peers compute the same ones."""
        return self.place("tp") == 0


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of this rank for ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UserError: CUDA was asked for and is not there, or there are more local ranks than devices.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError("CUDA was asked for, but torch sees no device", where="train.device", seen="cuda", legal="cpu")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            "more processes on this machine than devices",
            where="--nproc",
            seen=f"local rank {local_rank} with {torch.cuda.device_count()} CUDA devices",
        )
    return torch.device("cuda", local_rank)


@contextmanager
def open_world(degrees: Degrees | None = None, *, device: str = "auto", timeout_seconds: int = 600) -> Iterator[World]:
    """Join the job that the launcher describes (or a job of one) and leave it at the end.

    An error inside leaves a group with peers as it is: tearing it down could wait for them, and they may be waiting for
    this rank. The process is expected to end, which closes its connections and so frees them.

    Args:
        degrees: ranks per axis; None makes every rank a copy (dp_replicate).
        device: ``auto``, ``cpu`` or ``cuda``.
        timeout_seconds: longest time that one collective may take.

    Raises:
        UserError: a process group exists already (a training inside a training), or the device is not there.
    """
    place = env.ranks()
    here = pick_device(device, place.local_rank)
    if dist.is_initialized():
        raise UserError(
            "this process has joined a torch.distributed job already", hint="call destroy_process_group first"
        )
    if here.type == "cuda":
        torch.cuda.set_device(here)
    backend = "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if place.world_size > 1 or place.launched:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    if place.rank == 0 and degrees is not None and place.local_world_size % degrees.tp:
        log.warning(
            "tensor parallel ranks lie on several machines (parallel.tp = %d, %d processes on this one): every layer "
            "waits for the network; choose a tp that divides the processes of a machine",
            degrees.tp,
            place.local_world_size,
        )
    try:
        yield _make_world(place.rank, place.world_size, here, degrees, timeout)
    except BaseException:
        if place.world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _make_world(rank: int, size: int, device: torch.device, degrees: Degrees | None, timeout: timedelta) -> World:
    degrees = degrees or Degrees(dp_replicate=size)
    if degrees.world_size != size:
        raise UserError("the parallel degrees do not multiply to the number of processes", seen=f"{degrees} on {size}")
    mesh = init_device_mesh(device.type, degrees.shape, mesh_dim_names=AXES)
    shard_group = mesh["dp_shard", "cp"]._flatten("shard").get_group()
    reduce_group = mesh["dp_replicate", "dp_shard", "cp"]._flatten("reduce").get_group()
    checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)
    up, down = (dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)) if degrees.pp > 1 else (None, None)
    assert dist.group.WORLD is not None
    for group in (shard_group, reduce_group, *mesh.get_all_groups()):
        _set_timeout(group, timeout)
    return World(
        rank, size, device, degrees, mesh, dist.group.WORLD, reduce_group, shard_group, checkpoint_group,
        _expert_groups(device, degrees, timeout), up, down,
    )  # fmt: skip


def _set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """A mesh makes its groups with torch's own timeout, and there is no public way to say another."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def _expert_groups(device: torch.device, degrees: Degrees, timeout: timedelta) -> ExpertGroups | None:
    if degrees.ep == 1:
        return None
    names = ("pp", "expert_replicate", "expert_shard", "ep", "tp")
    mesh = init_device_mesh(device.type, degrees.expert_shape, mesh_dim_names=names)
    reduce_group = mesh["expert_replicate", "expert_shard"]._flatten("expert_reduce").get_group()
    shard_group, replicate_group = mesh.get_group("expert_shard"), mesh.get_group("expert_replicate")
    for group in (reduce_group, *mesh.get_all_groups()):
        _set_timeout(group, timeout)
    return ExpertGroups(mesh.get_group("ep"), reduce_group, shard_group, replicate_group)


def sum_over(group: dist.ProcessGroup, *values: float) -> list[float]:
    """Return the sums of host numbers over ``group``, in one all-reduce of fp64 (exact for counts below 2^53)."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if group.size() > 1:
        dist.all_reduce(numbers, group=group)
    return [float(number) for number in numbers]
