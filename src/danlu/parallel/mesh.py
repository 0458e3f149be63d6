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


@dataclass(frozen=True)
class World:
    """This process's place, its device, the mesh of named axes, and the group that checkpoints use."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    checkpoint_group: dist.ProcessGroup

    @property
    def data_rank(self) -> int:
        """Index over ``dp_replicate`` (x ``dp_shard``, once there is one)."""
        return int(self.mesh.get_local_rank("dp_replicate"))

    @property
    def data_degree(self) -> int:
        """Number of data ranks."""
        return int(self.mesh.size(self.mesh.mesh_dim_names.index("dp_replicate") if self.mesh.mesh_dim_names else 0))

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that share a global batch."""
        return self.mesh.get_group("dp_replicate")


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
def open_world(*, device: str = "auto", timeout_seconds: int = 600) -> Iterator[World]:
    """Join the job that the launcher describes (or a job of one) and leave it at the end.

    An error inside leaves a group with peers as it is: tearing it down could wait for them, and they may be waiting for
    this rank. The process is expected to end, which closes its connections and so frees them.

    Args:
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
    try:
        mesh = init_device_mesh(here.type, (place.world_size,), mesh_dim_names=("dp_replicate",))
        yield World(place.rank, place.world_size, here, mesh, dist.new_group(backend="gloo", timeout=timeout))
    except BaseException:
        if place.world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def sum_over(group: dist.ProcessGroup, *values: float) -> list[float]:
    """Return the sums of host numbers over ``group``, in one all-reduce of fp64 (exact for counts below 2^53)."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if group.size() > 1:
        dist.all_reduce(numbers, group=group)
    return [float(number) for number in numbers]
