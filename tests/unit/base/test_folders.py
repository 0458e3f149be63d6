"""Output goes to a folder that can hold it, or is refused before any work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from danlu.base.errors import UserError
from danlu.base.folders import check_output_file, make_folder


def test_missing_folders_are_made(tmp_path: Path) -> None:
    """Parents too; a folder that is there stays as it is."""
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "kept").write_text("x")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "kept").read_text() == "x"


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    """A file where the folder or one of its parents should be is the user's error."""
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match=r"(?s)train\.output: is a file, not a folder.*/file\n.*hint:"):
        make_folder(tmp_path / "file" / below, where="train.output")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses new folders")
def test_the_reason_of_the_system_is_told() -> None:
    """A folder that the system will not make gives its reason."""
    with pytest.raises(UserError, match=r"(?s)cannot be made: .*/proc/none"):
        make_folder(Path("/proc/none"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    """A folder in which no file can be made is refused."""
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(UserError, match="no files can be made"):
        make_folder(tmp_path / "closed")


def test_a_folder_is_no_output_file(tmp_path: Path) -> None:
    """A file to write may not be a folder; its own folder is made."""
    with pytest.raises(UserError, match="is a folder, not a file"):
        check_output_file(tmp_path)
    check_output_file(tmp_path / "new" / "eval.json")
    assert (tmp_path / "new").is_dir()
