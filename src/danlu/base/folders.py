"""Places for output: made, or refused with the reason, before the work that would fill them."""

from __future__ import annotations

import os
from pathlib import Path

from danlu.base.errors import UserError


def make_folder(folder: Path, *, where: str = "output") -> None:
    """Make ``folder`` and its parents where they are missing.

    Raises:
        UserError: something else stands in the way, or files cannot be made there; ``where`` names the option.
    """
    in_the_way = next((place for place in (folder, *folder.parents) if place.exists() and not place.is_dir()), None)
    if in_the_way is not None:
        raise UserError("is a file, not a folder", where=where, seen=in_the_way, hint="choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder cannot be made: {error.strerror}", where=where, seen=folder, hint="choose another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError("no files can be made in the folder", where=where, seen=folder, hint="choose another folder")


def check_output_file(path: Path, *, where: str = "output") -> None:
    """Make the folder of ``path``, a file that is to be written or replaced.

    Raises:
        UserError: the path is a folder, or its folder cannot be made.
    """
    if path.is_dir():
        raise UserError("is a folder, not a file", where=where, seen=path, hint="name the file to write")
    make_folder(path.parent, where=where)
