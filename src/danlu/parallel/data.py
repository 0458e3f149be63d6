"""Data parallelism: every rank holds the whole model and its share of the batch (DDP).

torch's DistributedDataParallel reduces gradients bucket by bucket while the backward pass goes on, and averages. danlu
needs the *sum*: each micro-batch loss is already divided by the token count of the whole global batch (DESIGN.md,
section 3), so a rank with few target tokens must not weigh as much as one with many. Hence a hook that sums; it keeps
the buckets and the overlap. No reduction happens before the last micro-batch of a step.

What it does not do: nothing is split, so memory per rank is that of one process.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from danlu.base.log import log


# DDP reads the annotations of a hook, so this module keeps them as objects: no `from __future__ import annotations`.
def _sum_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def apply_ddp(model: nn.Module, group: dist.ProcessGroup, *, bucket_cap_mb: float = 25.0) -> nn.Module:
    """Return ``model`` with gradients summed over ``group`` in buckets of ``bucket_cap_mb`` MiB.

    A group of one rank needs no reduction and gets the model itself.
    """
    if group.size() == 1:
        return model
    check_replicas(model, group)
    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook(group, _sum_hook)
    return wrapped


@contextmanager
def accumulating(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Hold back the gradient reduction unless this is the step's ``last`` micro-batch."""
    if last or not isinstance(model, DistributedDataParallel):
        yield
    else:
        with model.no_sync():
            yield


def parameter_hash(model: nn.Module) -> str:
    """Return a hash of all parameters' names, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_replicas(model: nn.Module, group: dist.ProcessGroup) -> bool:
    """Warn where the replicas differ before training; DDP then broadcasts rank 0's weights.

    Replicas that start apart stay apart without a word in frameworks that skip this, and only train worse.
    """
    mine = parameter_hash(model)
    hashes: list[str] = [""] * group.size()
    dist.all_gather_object(hashes, mine, group=group)
    different = [rank for rank, other in enumerate(hashes) if other != hashes[0]]
    if different:
        log.warning(
            "initial weights differ on data ranks %s; taking those of data rank 0 (were the seeds different?)",
            different,
        )
    return not different
