"""Bytes on the wire, counted: every collective that a block of code calls, by ranks, operation and dtype.

    with count_volume() as volume:
        ...one step...
    for message, total in volume.sent.items():
        ...

Collectives are operators of torch's dispatcher (namespace ``c10d``), whoever calls them: danlu, FSDP2, or the user.
A dispatch mode sees them all, on every backend, in the backward pass too, and without touching what is counted. An
operator that communicates and whose bytes are not known here raises: what is counted is complete, or not a number.

Convention: bytes that one rank *sends*, as ring algorithms move them (Patarasuk and Yuan, JPDC 69, 2009; the bound that
they prove is what NCCL's and gloo's large messages come near to). Over r ranks, for x bytes:

    all_reduce                x is the tensor                      2 (r - 1)/r x
    all_gather                x is the result                        (r - 1)/r x
    reduce_scatter            x is the source                        (r - 1)/r x
    all_to_all                x is the source                        (r - 1)/r x
    broadcast                 x is the tensor, passed on             (r - 1)/r x   (the mean; the last sends nothing)
    send                      x is the message                                 x

A backend may do otherwise (trees for small messages, NVLink multicast), which changes the seconds and not what a layout
asks for. Collectives of another thread (the writer of checkpoints) are not seen.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from danlu.base.errors import RunError
from danlu.base.layout import AXES, Degrees


@dataclass(frozen=True, slots=True)
class Message:
    """What is counted together."""

    ranks: tuple[int, ...]
    """Global ranks that talk: the group, or both ends of a message."""
    operation: str
    dtype: torch.dtype


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(tensors) if isinstance(tensor, Tensor))


def _share(size: int, turns: int = 1) -> float:
    return turns * (size - 1) / size


def _all_to_all_base(args: Sequence[Any], group: dist.ProcessGroup) -> float:
    source, splits = args[1], args[4]
    if not splits:
        return _bytes(source) * _share(group.size())
    own: float = splits[group.rank()] / max(1, sum(splits))
    return _bytes(source) * (1 - own)


def _all_to_all_list(args: Sequence[Any], group: dist.ProcessGroup) -> float:
    return _bytes(args[1]) - _bytes(args[1][group.rank()])


_Count = Callable[[Sequence[Any], dist.ProcessGroup], float]
_KNOWN: dict[str, tuple[str, int, _Count]] = {
    "allreduce_": ("all_reduce", 0, lambda args, group: _bytes(args[0]) * _share(group.size(), 2)),
    "allreduce_coalesced_": ("all_reduce", 0, lambda args, group: _bytes(args[0]) * _share(group.size(), 2)),
    "broadcast_": ("broadcast", 0, lambda args, group: _bytes(args[0]) * _share(group.size())),
    "send": ("send", 0, lambda args, group: _bytes(args[0])),
    "alltoall_": ("all_to_all", 1, _all_to_all_list),
    "alltoall_base_": ("all_to_all", 1, _all_to_all_base),
}
"""Operator -> name, place of the argument that is sent, bytes."""
for _name in ("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"):
    _KNOWN[_name] = ("all_gather", 1, lambda args, group: _bytes(args[1]) * (group.size() - 1))
for _name in ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
    _KNOWN[_name] = ("reduce_scatter", 1, lambda args, group: _bytes(args[1]) * _share(group.size()))
_SENDS_NOTHING = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_"}
_FUNCTIONAL = {"_c10d_functional", "_c10d_functional_autograd", "_dtensor"}


class Volume(TorchDispatchMode):
    """Counts while it is entered (see `count_volume`).

    Attributes:
        sent: bytes that this rank has sent.
        calls: how many collectives that were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[Message, float] = {}
        self.calls: Counter[Message] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "c10d":
            self._count(str(operator.overloadpacket.__name__), args)
        elif operator.namespace in _FUNCTIONAL and operator.overloadpacket.__name__ != "wait_tensor":
            raise RunError("bytes of this collective cannot be counted", seen=str(operator))
        return operator(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any]) -> None:
        if name in _SENDS_NOTHING:
            return
        if name not in _KNOWN:
            raise RunError("bytes of this collective cannot be counted", seen=name, legal=", ".join(sorted(_KNOWN)))
        operation, place, count = _KNOWN[name]
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        tensors = [tensor for tensor in tree_leaves(args[place]) if isinstance(tensor, Tensor)]
        ranks = dist.get_process_group_ranks(group)
        if operation == "send":
            ranks = sorted({ranks[group.rank()], ranks[args[2]]})
        message = Message(tuple(ranks), operation, tensors[0].dtype)
        self.calls[message] += 1
        self.sent[message] = self.sent.get(message, 0.0) + count(args, group)

    def by_axes(self, degrees: Degrees) -> dict[tuple[tuple[str, ...], str, torch.dtype], float]:
        """Return the bytes by (axes, operation, dtype); see `axes_of`."""
        totals: dict[tuple[tuple[str, ...], str, torch.dtype], float] = {}
        for message, sent in self.sent.items():
            key = (axes_of(message.ranks, degrees), message.operation, message.dtype)
            totals[key] = totals.get(key, 0.0) + sent
        return totals


@contextmanager
def count_volume() -> Iterator[Volume]:
    """Count the bytes that this rank sends inside the block.

    Raises:
        RunError: inside, where a collective is called that is not known here.
    """
    with Volume() as volume:
        yield volume


def axes_of(ranks: Iterable[int], degrees: Degrees) -> tuple[str, ...]:
    """Return the axes on which a group's ranks differ, outermost first; () for a group of one.

    Examples:
        >>> axes_of([0, 1, 2, 3], Degrees(dp_shard=2, cp=2, tp=2))
        ('cp', 'tp')
    """
    places = list(itertools.product(*map(range, degrees.shape)))
    held = [places[rank] for rank in ranks]
    return tuple(axis for index, axis in enumerate(AXES) if len({place[index] for place in held}) > 1)
