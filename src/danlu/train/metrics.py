"""What a run writes down: ``metrics.jsonl``, TensorBoard and a progress line.

One record per logged step, with the field names of DESIGN.md; losses keep full float precision so that two runs can be
compared bit by bit. Rates are taken over the steps since the last record (never over the whole run), and over training
time only: evaluation and saving do not count as slow training. Numbers stay on the device until a step is logged.

``mfu`` is model FLOPs over the device's dense peak: recompute not counted, causal attention as half; null where the
peak is not known (a CPU, an unlisted device).
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from danlu.base.log import log


class Rates:
    """Throughput since the last record. ``clock`` returns seconds and can be replaced in tests."""

    def __init__(self, *, num_devices: int, flops_per_token: float, peak_flops: float | None) -> None:
        self.num_devices = num_devices
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._tokens = 0
        self._seconds = self._wait = 0.0
        self._steps = 0

    def add(self, *, tokens: int, seconds: float, data_wait: float) -> None:
        """Count one step: tokens of all ranks (no padding), its duration and the part spent waiting for data."""
        self._tokens += tokens
        self._seconds += seconds
        self._wait += data_wait
        self._steps += 1

    def take(self) -> dict[str, float | None]:
        """Return the rates since the last call and start over."""
        seconds, steps = max(self._seconds, 1e-9), max(self._steps, 1)
        per_second = self._tokens / seconds
        per_device = per_second / self.num_devices
        mfu = None if self.peak_flops is None else per_device * self.flops_per_token / self.peak_flops
        rates: dict[str, float | None] = {
            "tokens_per_second": per_second,
            "tokens_per_second_per_gpu": per_device,
            "mfu": mfu,
            "hfu": mfu,  # nothing is executed twice without recompute
            "data_wait_seconds": self._wait / steps,
            "step_seconds": seconds / steps,
        }
        self._tokens = self._steps = 0
        self._seconds = self._wait = 0.0
        return rates


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of live device memory since the start; on a CPU the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drop records after ``last_step``: steps that a resumed run is going to do again."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= last_step]
    temporary = path.with_suffix(".jsonl.partial")
    temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")  # a line cut off by a kill


class MetricsWriter:
    """Writes records on rank 0; on other ranks every call does nothing.

    Args:
        folder: run folder; None on ranks that do not write.
        total_steps: for the progress line's share and ETA.
        first_step: step that the run starts (or resumes) at.
        tensorboard: also write event files.
        progress: show a progress bar where stderr is a terminal.
        clock: seconds, for the throttle of the log lines.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        total_steps: int,
        first_step: int = 0,
        tensorboard: bool = True,
        progress: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._clock = clock
        self._started = self._spoken = clock()
        self._first_step = first_step
        self._file = self._board = self._bar = None
        if folder is None:
            return
        path = folder / "metrics.jsonl"
        truncate_metrics(path, first_step)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else None)
        if progress and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=Console(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task("", total=total_steps, completed=first_step)
            self._bar.start()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._board is not None:
            self._board.close()
        if self._file is not None:
            self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Write one record; it must hold ``step``. Numbers that are not finite become null (JSON has no NaN)."""
        if self._file is None:
            return
        self._file.write(json.dumps({key: _finite(value) for key, value in record.items()}) + "\n")
        self._file.flush()
        step = int(record["step"])
        if self._board is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                    self._board.add_scalar(key, value, step)
        if "loss" in record:
            self._show(step, record)

    def _show(self, step: int, record: dict[str, Any]) -> None:
        text = f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  {record['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        now = self._clock()
        if now - self._spoken < 5 and step not in (self._first_step + 1, self.total_steps):
            return
        self._spoken = now
        left = (now - self._started) / max(1, step - self._first_step) * (self.total_steps - step)
        log.info("step %d/%d  %s  ETA %d:%02d", step, self.total_steps, text, left // 60, left % 60)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not (-float("inf") < value < float("inf")) else value
