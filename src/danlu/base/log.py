"""The only module that prints.

Logs go to stderr, results to stdout, so ``danlu ... --json | jq`` always works. In a job of many ranks, rank 0 tells
the story and the others speak only from warning upwards, with their rank in front.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from danlu.base import env

log = logging.getLogger("danlu")


class _Format(logging.Formatter):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")
        self.prefix = f"[rank {rank}] " if world_size > 1 and rank > 0 else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        record = logging.makeLogRecord(
            {**record.__dict__, "msg": f"{self.prefix}{level}{record.getMessage()}", "args": ()}
        )
        return super().format(record)


class _Stderr(logging.StreamHandler):
    """Writes to whatever ``sys.stderr`` is at that moment (progress bars and tests replace it)."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup_log(file: Path | None = None) -> None:
    """Send the log to stderr and, on rank 0, also to ``file``. Calling it again replaces the handlers."""
    place = env.ranks()
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_Stderr()]
    if file is not None and place.rank == 0:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(_Format(place.rank, place.world_size))
        log.addHandler(handler)
    log.setLevel(logging.INFO if place.rank == 0 else logging.WARNING)
    log.propagate = False


def print_result(text: str) -> None:
    """Print a result for people on stdout."""
    print(text, file=sys.stdout, flush=True)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout (what ``--json`` promises)."""
    print(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False), file=sys.stdout, flush=True)


def print_error(text: str) -> None:
    """Print the last word of a command that fails, on stderr."""
    print(text, file=sys.stderr, flush=True)
