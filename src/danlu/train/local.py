"""``--nproc N``: the same command once per local rank, under torchrun's own agent.

The agent picks a free port (two jobs on a machine never collide), watches the ranks and ends all of them when one
fails. The rank that failed first is the cause; its message is printed last, because the others only report that a peer
went away.

SIGTERM and Ctrl-C are passed on to the ranks and nothing more: they finish their step, save and end by themselves. The
agent's own handlers would give them thirty seconds, kill what is still saving, and call it a success either way.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from danlu.base import env
from danlu.base.errors import DanluError, UserError
from danlu.base.log import log, print_error

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


_OURS = "danlu-"
"""What the job's id begins with; ranks that see it leave the last word to the launcher."""


@dataclass(frozen=True)
class JobResult:
    """How a job of local ranks ended."""

    exit_code: int
    stopped_by: str | None
    """Signal that was passed on to the ranks."""


def run_local_ranks(words: Sequence[str], *, nproc: int) -> JobResult:
    """Run ``python -m danlu`` with ``words`` as ``nproc`` ranks of one job, from the main thread."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the last word is ours
    env.set_default("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or nproc) // nproc)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"{_OURS}{uuid.uuid4().hex}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    received: list[str] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        ranks = psutil.Process().children()
        if not ranks:  # none is there yet that could end by itself
            raise SignalException("before the ranks started", sigval=signal.Signals(number))
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    code = 0
    try:
        elastic_launch(config, sys.executable)("-m", "danlu", *words)
    except SignalException as stopped:
        print_error(f"ended by {stopped.sigval.name}")
        code = 1
    except ChildFailedError as error:
        rank, failure = find_cause(error.failures)
        code = 2 if failure.exitcode == 2 else 1
        number = signal.Signals[received[-1]] if received else 0
        if number and failure.exitcode in (-number, 128 + number):
            print_error(f"ended by {received[-1]} before the ranks had saved")
        elif failure.error_file_data.get("before_joining"):  # nothing about it is one rank's own
            print_error(f"error: {failure.message}")
        else:
            print_error(f"rank {rank} failed first (exit code {failure.exitcode}):\n{failure.message}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and code == 0:
        log.warning("stopped by %s", received[0])
    return JobResult(code, received[0] if received else None)


def find_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and its failure.

    Ranks that raised have written when, to the nanosecond: peers complain milliseconds later, and the agent's own times
    are whole seconds. A rank that was killed (by the kernel for its memory, say) could write nothing; the agent notices
    it within a second of its peers' complaints. SIGTERM is how the agent itself ends the others.
    """

    def moment(failure: ProcessFailure) -> float:
        written = failure.error_file_data.get("time_ns")
        return written / 1e9 if written else failure.timestamp - 1.0

    return min(failures.items(), key=lambda item: (item[1].exitcode == -signal.SIGTERM, moment(item[1])))


def run_as_rank(work: Callable[[], None]) -> None:
    """Run a rank's work; on an error tell the agent the cause and end the process at once.

    Leaving at once closes this rank's connections, which ends collectives that its peers are waiting in; an orderly
    shutdown would wait for them instead.
    """
    try:
        work()
    except KeyboardInterrupt:  # the launcher knows why, and says it once
        os._exit(130)
    except BaseException as error:
        cause = str(error) if isinstance(error, DanluError) else "".join(traceback.format_exception(error))
        # wrong input is found by every rank, before it joins the others
        alike = isinstance(error, UserError) and not _has_joined()
        if path := env.get("TORCHELASTIC_ERROR_FILE"):
            told = {"message": cause, "timestamp": int(time.time()), "time_ns": time.time_ns(), "before_joining": alike}
            Path(path).write_text(json.dumps(told), encoding="utf-8")
        if not (alike and (env.get("TORCHELASTIC_RUN_ID") or "").startswith(_OURS)):
            print_error(f"[rank {env.ranks().rank}] {cause}")
        logging.shutdown()
        sys.stdout.flush()
        os._exit(error.exit_code if isinstance(error, DanluError) else 1)


def _has_joined() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()
