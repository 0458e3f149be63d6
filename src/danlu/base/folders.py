"""Places for output: made, or refused with the reason, before the work that would fill them; held by one process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from danlu.base.errors import UserError
from danlu.base.log import log


def check_folder(folder: Path | str, *, where: str = "output") -> None:
    """Find out, without making anything, whether a folder can be there and take files.

    Raises:
        UserError: no name for a folder, something else in the way, or no right to write; ``where`` names the option.
    """
    if not str(folder).strip():
        raise UserError("no folder is named", where=where, seen=repr(str(folder)), hint="name the folder to write into")
    path = Path(folder)
    try:
        in_the_way = next((place for place in (path, *path.parents) if _is_there(place) and not place.is_dir()), None)
        nearest = next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())
        longest = os.pathconf(nearest, "PC_NAME_MAX")
        if any(len(os.fsencode(part)) > longest for part in path.parts):  # also below what is not there yet
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except (OSError, ValueError) as error:  # too long, a NUL
        reason = error.strerror if isinstance(error, OSError) else str(error)
        seen = repr(str(folder) if len(str(folder)) <= 200 else f"{str(folder)[:200]}...")
        raise UserError(f"no folder can have this name: {reason}", where=where, seen=seen) from None
    if in_the_way is not None:
        raise UserError("is a file, not a folder", where=where, seen=in_the_way, hint="choose another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError("no files can be made in the folder", where=where, seen=nearest, hint="choose another folder")


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_folder(folder: Path, *, where: str = "output") -> None:
    """Make ``folder`` and its parents where they are missing.

    Raises:
        UserError: something else stands in the way, or files cannot be made there; ``where`` names the option.
    """
    check_folder(folder, where=where)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder cannot be made: {error.strerror}", where=where, seen=folder, hint="choose another folder"
        ) from error


@contextmanager
def lock_folder(folder: Path, *, what: str, hint: str | None = None) -> Iterator[None]:
    """Hold ``folder/.lock`` inside the block, against every other process.

    The operating system holds the lock for this process and drops it when the process ends, however it ends; the file
    stays and means nothing by itself. It is a POSIX record lock, because a ``flock`` would live on in the loader
    processes that a killed run leaves behind for some seconds.

    Raises:
        UserError: another process holds it; ``what`` and ``hint`` are said then.
    """
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            file.seek(0)
            raise UserError(what, where=str(folder), seen=file.read().strip() or None, hint=hint) from None
        except OSError as error:
            log.warning("%s cannot be locked here (%s): see to it that nothing else uses it", folder, error.strerror)
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def check_output_file(path: Path, *, where: str = "output") -> None:
    """Make the folder of ``path``, a file that is to be written or replaced.

    Raises:
        UserError: the path is a folder, or its folder cannot be made.
    """
    if path.is_dir():
        raise UserError("is a folder, not a file", where=where, seen=path, hint="name the file to write")
    make_folder(path.parent, where=where)
