"""Who is to blame when several ranks fail."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from danlu.train.local import find_cause


def failure(
    tmp_path: Path, rank: int, exitcode: int, *, said: float | None = None, noticed: float = 0.0
) -> ProcessFailure:
    """Make a failure as the agent does: from the file that the rank wrote (at ``said``), or noticed without one."""
    path = tmp_path / f"error-{rank}.json"
    if said is not None:
        path.write_text(json.dumps({"message": f"rank {rank}", "timestamp": int(said), "time_ns": int(said * 1e9)}))
    made = ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=str(path))
    if said is None:
        made.timestamp = int(noticed)
    return made


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        # (exit code, when it wrote, when the agent noticed)
        pytest.param((1, 100.953, 0), (2, 100.951, 0), 1, id="same second, the earlier nanosecond"),
        pytest.param((1, 100.060, 0), (-signal.SIGKILL, None, 100.1), 1, id="killed, before the peers complain"),
        pytest.param((1, 100.990, 0), (-signal.SIGKILL, None, 101.2), 1, id="over the edge of a second"),
        pytest.param((1, 100.000, 0), (-signal.SIGKILL, None, 130.5), 0, id="killed by the agent, for it hung"),
        pytest.param((2, 100.900, 0), (-signal.SIGTERM, None, 101.0), 0, id="ended by the agent"),
        pytest.param((-signal.SIGTERM, None, 100.0), (1, 100.9, 0), 1, id="ended by the agent, lower rank"),
    ],
)  # fmt: skip
def test_the_cause_is_the_rank_that_failed_first(
    tmp_path: Path, first: tuple[int, float | None, float], second: tuple[int, float | None, float], cause: int
) -> None:
    """By the ranks' own clocks where they could write, else by the agent's; what the agent ended is never the cause."""
    failures = {
        rank: failure(tmp_path, rank, int(code), said=said, noticed=noticed)
        for rank, (code, said, noticed) in enumerate((first, second))
    }
    assert find_cause(failures)[0] == cause
