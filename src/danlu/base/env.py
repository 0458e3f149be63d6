"""The only module that reads (or sets) environment variables.

One place means one list of what can influence a run from outside its config. Ranks come from torchrun's variables,
which Slurm, Kubernetes and Ray launchers set too; everything of danlu's own begins with ``DANLU_``.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from danlu.base.errors import UserError


def get(name: str, default: str | None = None) -> str | None:
    """Return the variable ``name``, or ``default`` where it is unset or empty."""
    return os.environ.get(name) or default


def set_default(name: str, value: str) -> None:
    """Set ``name`` for this process and its children unless the user has set it (to more than nothing)."""
    os.environ[name] = get(name) or value


def _number(name: str, default: int) -> int:
    text = get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError("environment variable is not a whole number", where=name, seen=text) from None


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place in the job, as the launcher tells it."""

    rank: int
    world_size: int
    local_rank: int
    launched: bool
    """True under torchrun or an equivalent launcher (a rendezvous address is known)."""
    local_world_size: int = 1
    """Processes on this machine."""


def ranks() -> Ranks:
    """Read rank, world size and local rank; one process alone is rank 0 of 1."""
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise UserError("RANK lies outside the world", where="RANK", seen=rank, legal=f"0 to {world_size - 1}")
    launched = get("MASTER_ADDR") is not None and get("RANK") is not None
    return Ranks(rank, world_size, _number("LOCAL_RANK", 0), launched, _number("LOCAL_WORLD_SIZE", world_size))


def cache_folder() -> Path:
    """Folder for converted models: ``$DANLU_CACHE``, or ``~/.cache/danlu``."""
    return Path(get("DANLU_CACHE") or Path.home() / ".cache" / "danlu")


def terminal_width() -> int:
    """Columns for what is printed: ``$COLUMNS``, those of the terminal, or 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns
