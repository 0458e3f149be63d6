"""The stopwatch that all contestants share: one optimizer step at a time, when the referee says so.

Each contestant runs its own, complete training loop. The only thing added is a hook that torch itself calls after every
`Optimizer.step` in the process. There the contestant reports the step and sleeps until the referee says ``go``; so
contestants that live side by side take turns step by step, and one step's time covers everything its loop does from one
update to the next: logging, zeroing gradients, loading a batch, forward, backward, clipping, update.

Messages go over the process's original stdout, one JSON object a line; whatever a library prints goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
import time
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_PACKAGES = ("torch", "transformers", "accelerate", "trl", "datasets", "danlu")


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Clock:
    """Reports every optimizer step and waits for the referee's word in between."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._begin()
        register_optimizer_step_post_hook(self._after_step)

    def _begin(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._faults, self._system = usage.ru_minflt, usage.ru_stime
        self._cpu, self._start = time.process_time(), time.perf_counter()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seconds, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._say(
            event="step",
            seconds=seconds,
            cpu_seconds=cpu,
            system_seconds=usage.ru_stime - self._system,
            page_faults=usage.ru_minflt - self._faults,
            peak_rss_bytes=peak_rss_bytes(),
        )
        if sys.stdin.readline().strip() != "go":
            os._exit(0)  # the referee went away
        self._begin()

    def _say(self, **message: Any) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def finish(self, *, losses: list[float], grad_norms: list[float], notes: dict[str, Any], **counts: Any) -> None:
        """Report the end: per-step losses and gradient norms, and anything worth knowing about how it ran."""
        found = {}
        for name in _PACKAGES:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        self._say(event="end", losses=losses, grad_norms=grad_norms, notes=notes, versions=found, **counts)
