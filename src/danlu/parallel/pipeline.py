"""Runs a pipeline schedule: this rank's stages, action by action, and what moves between ranks.

The order is not decided here: it is a checked value (`schedule`), and this file does what it says. For each action,
take what it needs from its inbox, compute, pass the result on. Four rules make that safe on any backend:

- Sends never block. What was sent is kept until it has left.
- Between two ranks there is one channel each way (`up` and `down` are process groups of their own, so that opposite
  messages never queue behind each other), and receives are posted in the sender's order, which the schedule gives.
  They are posted two ahead of need, so that a message travels while the rank computes.
- Channels are opened before the first step (`Pipeline.open`), because NCCL connects two ranks at their first message.
- Shapes are known to both sides: all ranks of a pipeline see the same rows, so nobody exchanges sizes, and every
  micro-batch may have its own length.

A stage's input is a leaf; its backward pass starts from the gradient that comes back (and from whatever loss the stage
itself has), and the leaf's gradient is what the stage before is waiting for. Of a stage's output only the place in the
graph is kept, not the tensor: it is on another rank by then. Only hidden states and their gradients travel; tokens,
positions and document ids are everybody's.

Where the schedule splits the backward pass (I and W), weight gradients of Linears wait (`model.linear`); everything
else of the backward pass (norms, biases, experts, the head) is done in I.

What it does not do: overlap one action's computing with another's, or split the optimizer step.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from danlu.model.decoder import Decoder
from danlu.model.linear import Linear, WeightGradients
from danlu.parallel.schedule import (
    Action,
    Schedule,
    Transfer,
    build_schedule,
    check_schedule,
    schedule_facts,
    transfers,
)

_AHEAD = 2
"""Receives that are posted before they are needed."""


@dataclass(frozen=True)
class Channels:
    """The ranks of one pipeline.

    Attributes:
        ranks: global ranks, by place in the pipeline.
        place: this rank's.
        up: group that messages to a higher place go through.
        down: group that messages to a lower place go through.
    """

    ranks: tuple[int, ...]
    place: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup

    def send(self, tensor: Tensor, to: int) -> dist.Work:
        """Begin to send to the rank at place ``to``."""
        group = self.up if to > self.place else self.down
        work = dist.isend(tensor, self.ranks[to], group=group)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, source: int) -> dist.Work:
        """Begin to receive from the rank at place ``source``."""
        group = self.up if self.place > source else self.down
        work = dist.irecv(tensor, self.ranks[source], group=group)
        assert work is not None
        return work

    def meet(self) -> None:
        """Wait until all ranks of the pipeline are here."""
        token = torch.zeros(1)  # through the host, whatever the device
        others = [place for place in range(len(self.ranks)) if place != self.place]
        if self.place == 0:
            for source in others:
                self.receive(token, source).wait()
            for work in [self.send(token, to) for to in others]:
                work.wait()
        else:
            self.send(token, 0).wait()
            self.receive(token, 0).wait()

    def sum_with(self, tensor: Tensor, peer: int) -> None:
        """Add what the rank at place ``peer`` has; both call this, and both end with the same numbers."""
        theirs = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        works = [self.send(tensor.contiguous(), peer), self.receive(theirs, peer)]
        for work in works:
            work.wait()
        tensor += theirs


class StageForward(Protocol):
    """Runs one stage on one micro-batch."""

    def __call__(self, stage: int, micro_batch: int, hidden_BSD: Tensor | None, /) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states for the next stage (anything, for the last), and a loss to start from, or None."""


@dataclass
class _Held:
    """What a stage keeps of a micro-batch between F and B."""

    source: Tensor | None
    output: GradientEdge | None
    loss: Tensor | None


@dataclass(frozen=True)
class Traced:
    """When an action ran, in seconds since all ranks of the pipeline had met: each reads its own clock from there on.

    So times of different ranks agree as well as their answers to the last message of `Channels.meet`: within the
    latency of one small message, and clocks do not drift apart within a step.
    """

    action: Action
    start_seconds: float
    end_seconds: float


class _Inbox:
    """What comes from one rank, in its order."""

    def __init__(self, channels: Channels, source: int, expected: Sequence[Transfer]) -> None:
        self.channels, self.source = channels, source
        self.expected, self.posted, self.arrived = deque(expected), deque[tuple[Transfer, Tensor, dist.Work]](), {}  # type: ignore[var-annotated]

    def post(self, make: Callable[[int], Tensor], ahead: int = _AHEAD) -> None:
        while self.expected and len(self.posted) < ahead:
            transfer = self.expected.popleft()
            tensor = make(transfer.micro_batch)
            self.posted.append((transfer, tensor, self.channels.receive(tensor, self.source)))

    def take(self, wanted: Transfer, make: Callable[[int], Tensor]) -> Tensor:
        while wanted not in self.arrived:
            self.post(make)
            transfer, tensor, work = self.posted.popleft()
            work.wait()
            self.arrived[transfer] = tensor
        taken: Tensor = self.arrived.pop(wanted)
        return taken


class Pipeline:
    """One rank of a pipeline: the schedule's actions for it, run on the stages that it holds."""

    def __init__(self, channels: Channels, *, schedule: str, num_virtual: int) -> None:
        """Take the rank's place.

        Args:
            channels: to the other ranks.
            schedule: one of `schedule.SCHEDULES`.
            num_virtual: stages a rank.
        """
        self.channels, self.name, self.num_virtual = channels, schedule, num_virtual
        self.later: WeightGradients | None = None
        self.num_stages = len(channels.ranks) * num_virtual
        self._schedules: dict[int, Schedule] = {}

    def schedule(self, num_micro_batches: int) -> Schedule:
        """Return the schedule of a step with so many micro-batches (an epoch's last step has fewer)."""
        if num_micro_batches not in self._schedules:
            made = build_schedule(self.name, len(self.channels.ranks), self.num_virtual, num_micro_batches)
            check_schedule(made)
            self._schedules[num_micro_batches] = made
        return self._schedules[num_micro_batches]

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages that this rank holds."""
        return self.schedule(1).stages_of(self.channels.place)

    def adopt(self, parts: Mapping[int, Decoder]) -> None:
        """Prepare this rank's stages: Linears that let weight gradients wait, one table where both ends are here."""
        if schedule_facts(self.name).splits_backward:
            self.later = WeightGradients()
            for part in parts.values():
                for module in part.modules():
                    if isinstance(module, Linear):
                        module.later = self.later
        first, last = parts.get(0), parts.get(self.num_stages - 1)
        if first is not None and last is not None and first is not last and first.spec.tied_embeddings:
            assert first.embedding is not None
            last.borrow_head(first.embedding)

    def open(self, device: torch.device, *, tied: bool) -> None:
        """Exchange a first message with each rank that this one is going to talk to, pair by pair in one order.

        NCCL connects two ranks at their first message on a channel, and each of them waits there for the other. In the
        order of a schedule, which posts receives before it sends, two ranks would wait on different channels.

        Args:
            device: where hidden states are.
            tied: the ranks of the first and the last stage sum the gradients of a table that both hold.
        """
        places = [self.schedule(1).stage_to_rank[stage] for stage in range(self.num_stages)]
        neighbours = [*itertools.pairwise(places), *([(places[-1], places[0])] if tied else [])]
        for low, high in sorted({(min(pair), max(pair)) for pair in neighbours if pair[0] != pair[1]}):
            if self.channels.place in (low, high):
                peer = high if self.channels.place == low else low
                for sender in (low, high):
                    word = torch.zeros(1, device=device)
                    talk = self.channels.send if self.channels.place == sender else self.channels.receive
                    talk(word, peer).wait()

    def other_end(self) -> int | None:
        """Return where the last stage is, on the first's rank, and the reverse; None elsewhere or if both are here."""
        ends = {self.schedule(1).stage_to_rank[stage] for stage in (0, self.num_stages - 1)}
        others = ends - {self.channels.place}
        return others.pop() if len(ends) == 2 and len(others) == 1 else None

    def run(
        self,
        make: Callable[[int], Tensor],
        num_micro_batches: int,
        forward: StageForward,
        *,
        after_backward: Callable[[int, bool], None] | None = None,
        trace: list[Traced] | None = None,
    ) -> None:
        """Run one step, or its forward half.

        Args:
            make: returns an empty tensor for the hidden states of a micro-batch.
            num_micro_batches: micro-batches in the step.
            forward: runs a stage.
            after_backward: is told when a micro-batch's backward pass through a stage is complete, and whether it was
                the stage's last; None runs the forward passes only.
            trace: is filled with the time of each action.
        """
        _Step(self, make, num_micro_batches, forward, after_backward).run(trace)


def _now() -> float:
    """Return the time at which this rank has done everything that it was told to, except to send."""
    if torch.cuda.is_initialized():
        # not the whole device: what is being sent may have to wait for a receiver that waits for this rank
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()


class _Step:
    """One run of a schedule."""

    def __init__(
        self,
        pipeline: Pipeline,
        make: Callable[[int], Tensor],
        num_micro_batches: int,
        forward: StageForward,
        after_backward: Callable[[int, bool], None] | None,
    ) -> None:
        self.pipeline, self.channels, self.later = pipeline, pipeline.channels, pipeline.later
        self.make, self.forward, self.after_backward = make, forward, after_backward
        self.schedule = pipeline.schedule(num_micro_batches)
        kinds = "F" if after_backward is None else "FBIW"
        self.order = [action for action in self.schedule.orders[self.channels.place] if action.kind in kinds]
        self.held: dict[tuple[int, int], _Held] = {}
        self.products: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.here: dict[Transfer, Tensor] = {}  # from one stage of this rank to another
        self.leaving: deque[tuple[dist.Work, Tensor]] = deque()
        self.left = Counter(action.stage for action in self.order if action.kind in "BW")
        self.inboxes = {
            source: _Inbox(
                self.channels, source, [each for each in moved if each.what == "activation" or after_backward]
            )
            for (source, target), moved in transfers(self.schedule).sends.items()
            if target == self.channels.place
        }

    def run(self, trace: list[Traced] | None) -> None:
        if trace is not None:
            _now()
            self.channels.meet()
        began = time.perf_counter()
        for action in self.order:
            for inbox in self.inboxes.values():
                inbox.post(self.make)
            got = self._receive(action)
            start = 0.0 if trace is None else _now()
            self._do(action, got)
            if trace is not None:
                trace.append(Traced(action, start - began, _now() - began))
            while self.leaving and self.leaving[0][0].is_completed():
                self.leaving.popleft()
        for work, _ in self.leaving:
            work.wait()

    def _receive(self, action: Action) -> Tensor | None:
        """Return what an action needs from another stage."""
        stage, kind, micro_batch = action
        source = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= source < self.schedule.num_stages:
            return None
        what = Transfer("activation" if kind == "F" else "gradient", source, stage, micro_batch)
        place = self.schedule.stage_to_rank[source]
        return self.here.pop(what) if place == self.channels.place else self.inboxes[place].take(what, self.make)

    def _send(self, what: Transfer, tensor: Tensor) -> None:
        place = self.schedule.stage_to_rank[what.to_stage]
        if place == self.channels.place:
            self.here[what] = tensor
            return
        tensor = tensor.contiguous()
        self.leaving.append((self.channels.send(tensor, place), tensor))

    def _do(self, action: Action, got: Tensor | None) -> None:
        stage, kind, micro_batch = action
        if kind == "F":
            self._forward(stage, micro_batch, got)
        elif kind == "W":
            self._weights(stage, self.products.pop((stage, micro_batch)))
        else:
            products = self._backward(stage, micro_batch, got)
            if kind == "I":
                self.products[stage, micro_batch] = products
            else:
                self._weights(stage, products)

    def _forward(self, stage: int, micro_batch: int, hidden_BSD: Tensor | None) -> None:
        training = self.after_backward is not None
        if hidden_BSD is not None:
            hidden_BSD = hidden_BSD.detach().requires_grad_(training)
        out_BSD, loss = self.forward(stage, micro_batch, hidden_BSD)
        is_last = stage == self.schedule.num_stages - 1
        if not is_last:
            self._send(Transfer("activation", stage, stage + 1, micro_batch), out_BSD.detach())
        if training:
            edge = get_gradient_edge(out_BSD) if not is_last and out_BSD.requires_grad else None
            self.held[stage, micro_batch] = _Held(hidden_BSD, edge, loss)

    def _backward(self, stage: int, micro_batch: int, grad_BSD: Tensor | None) -> list[Callable[[], None]]:
        held = self.held.pop((stage, micro_batch))
        roots: list[Tensor | GradientEdge] = []
        grads: list[Tensor | None] = []
        if held.output is not None:
            roots.append(held.output)
            grads.append(grad_BSD)
        if held.loss is not None and held.loss.requires_grad:
            roots.append(held.loss)
            grads.append(None)
        if roots:
            torch.autograd.backward(roots, grads)  # type: ignore[arg-type]
        if held.source is not None:
            grad = held.source.grad
            self._send(
                Transfer("gradient", stage, stage - 1, micro_batch),
                torch.zeros_like(held.source) if grad is None else grad,
            )
        return [] if self.later is None else self.later.take()

    def _weights(self, stage: int, products: list[Callable[[], None]]) -> None:
        for product in products:
            product()
        self.left[stage] -= 1
        assert self.after_backward is not None
        self.after_backward(stage, self.left[stage] == 0)
