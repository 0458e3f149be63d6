"""What is known of each pipeline schedule before it is built: its needs, its source, its ideal bubble.

Let a rank take F, I and W seconds for one micro-batch through all of its layers (forward, gradient of the input,
gradient of the weights), all ranks the same, transfers free. It works m (F + I + W) in a step of m micro-batches and
is idle for

- gpipe, 1f1b: (p - 1)(F + I + W), the ramp up and down (arXiv 2104.04473, section 2.2.1);
- interleaved, looped_bfs: the same by v (arXiv 2104.04473, section 2.2.2; 2211.05953). With m < p a rank also waits,
  between its stages, for the first micro-batch to come round: (v - 1)(p - m)(F + I + W) / v more;
- zero_bubble: (p - 1)(F + I - W) for W <= F and W <= I (arXiv 2401.10241, section 2.1). Where W is longer, what
  remains is the longer of F and I: the first forward cannot reach the last rank sooner, nor the last gradient the
  first. The interleaved form has it by v;
- zbv, dualpipev: (p - 1) F / 2 where F = I = W: the way of the first forward to the last rank. The papers' 'zero'
  counts from a rank's own start to its own end, and lets its optimizer step begin there; counted to the end of the
  whole step, as here, the shift between ranks stays.

The last two lines and the additions to the papers' terms were found with `danlu.parallel.timeline`; its tests hold
every formula here against a simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from danlu.base.errors import unknown_name
from danlu.parallel import schedule_orders
from danlu.parallel.schedule_orders import Order

Idle = Callable[[int, int, int, float, float, float], float | None]
"""(num_ranks, num_virtual, num_micro_batches, F, I, W) to idle seconds of a rank, or None: no closed form known."""


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """One schedule's facts."""

    order: Callable[[int, int, int, int], Order]
    """(rank, num_ranks, num_virtual, num_micro_batches) to the rank's order."""
    min_virtual: int
    max_virtual: int | None
    """Stages a rank: the fewest and the most; None: no limit."""
    placement: Literal["loop", "v"]
    """loop: stage s is on rank s mod p. v: down the ranks and back up, so rank 0 holds the first and the last stage."""
    splits_backward: bool
    idle: Idle
    bubble: str
    """`idle` in words, for p ranks, v stages a rank and m micro-batches."""
    source: str

    @property
    def legal_virtual(self) -> str:
        """Which numbers of stages a rank are legal, in words."""
        return f"{self.min_virtual} or more" if self.max_virtual is None else str(self.min_virtual)

    def takes(self, num_virtual: int) -> bool:
        """Return whether the schedule has an order for so many stages a rank."""
        return self.min_virtual <= num_virtual <= (self.max_virtual or num_virtual)


def _ramp(p: int, v: int, m: int, forward: float, input_gradient: float, weight_gradient: float) -> float:
    return (p - 1 + (v - 1) * max(0, p - m)) * (forward + input_gradient + weight_gradient) / v


def _filled_ramp(p: int, v: int, m: int, forward: float, input_gradient: float, weight_gradient: float) -> float | None:
    longest = max(forward, input_gradient, forward + input_gradient - weight_gradient)
    return (p - 1) * longest / v if m >= p else None


def _v_ramp(least_micro_batches: Callable[[int], int]) -> Idle:
    def idle(p: int, v: int, m: int, forward: float, input_gradient: float, weight_gradient: float) -> float | None:
        known = forward == input_gradient == weight_gradient and m >= least_micro_batches(p)
        return (p - 1) * forward / 2 if known else None

    return idle


_WHOLE, _SPLIT = "(p-1)(F+I+W)", "(p-1) max(F, I, F+I-W)"
_V_FORMULA = "(p-1) F/2 where F=I=W and m >= "

SCHEDULES: dict[str, ScheduleFacts] = {
    "gpipe": ScheduleFacts(schedule_orders.gpipe, 1, 1, "loop", False, _ramp, _WHOLE, "arXiv 1811.06965"),
    "1f1b": ScheduleFacts(
        schedule_orders.one_forward_one_backward, 1, 1, "loop", False, _ramp, _WHOLE, "arXiv 2104.04473, section 2.2.1"
    ),
    "interleaved": ScheduleFacts(
        schedule_orders.interleaved, 2, None, "loop", False, _ramp, f"{_WHOLE}/v", "arXiv 2104.04473, section 2.2.2"
    ),
    "looped_bfs": ScheduleFacts(
        schedule_orders.looped_bfs, 2, None, "loop", False, _ramp, f"{_WHOLE}/v", "arXiv 2211.05953"
    ),
    "zero_bubble": ScheduleFacts(
        schedule_orders.zero_bubble, 1, 1, "loop", True, _filled_ramp, _SPLIT, "arXiv 2401.10241, ZB-H1"
    ),
    "interleaved_zero_bubble": ScheduleFacts(
        schedule_orders.interleaved_zero_bubble,
        2,
        None,
        "loop",
        True,
        _filled_ramp,
        f"{_SPLIT}/v",
        "arXiv 2104.04473 with the split of 2401.10241",
    ),
    "zbv": ScheduleFacts(
        schedule_orders.zbv,
        2,
        2,
        "v",
        True,
        _v_ramp(lambda p: 2 * p - 1),
        f"{_V_FORMULA}2p-1",
        "arXiv 2401.10241, section 6",
    ),
    "dualpipev": ScheduleFacts(
        schedule_orders.dualpipev,
        2,
        2,
        "v",
        True,
        _v_ramp(lambda p: 2 * p),
        f"{_V_FORMULA}2p",
        "arXiv 2412.19437, cut in half",
    ),
}
"""Every schedule that danlu knows, by the name that configs and commands use."""


def schedule_facts(name: str) -> ScheduleFacts:
    """Return the facts of a schedule.

    Raises:
        UserError: there is no such schedule.
    """
    if name not in SCHEDULES:
        raise unknown_name("pipeline schedule", name, SCHEDULES)
    return SCHEDULES[name]


def theoretical_bubble(
    name: str,
    num_ranks: int,
    num_virtual: int,
    num_micro_batches: int,
    *,
    forward_seconds: float = 1.0,
    input_gradient_seconds: float = 1.0,
    weight_gradient_seconds: float = 1.0,
) -> float | None:
    """Return the idle share of a step by the formula at the top of this file.

    Args:
        name: one of `SCHEDULES`.
        num_ranks: ranks in the pipeline.
        num_virtual: stages a rank.
        num_micro_batches: micro-batches in a step.
        forward_seconds: one micro-batch through all layers of a rank; any unit, only ratios count.
        input_gradient_seconds: the same for the gradient of the input.
        weight_gradient_seconds: the same for the gradient of the weights.

    Returns:
        Idle seconds by all seconds, or None where no closed form is known.

    >>> theoretical_bubble("1f1b", 8, 1, 25)
    0.21875
    """
    times = (forward_seconds, input_gradient_seconds, weight_gradient_seconds)
    idle = schedule_facts(name).idle(num_ranks, num_virtual, num_micro_batches, *times) if num_ranks > 1 else 0.0
    if idle is None:
        return None
    step = num_micro_batches * sum(times) + idle
    return idle / step if step else 0.0
