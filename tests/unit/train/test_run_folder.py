"""The run folder: a name that can be one, for one run at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from danlu.base.errors import UserError
from danlu.base.folders import lock_folder
from danlu.train.loop import train
from danlu.train.run_folder import check_run_folder
from tiny import HOLD, held_elsewhere, tiny_config


def test_a_second_run_into_a_folder_is_refused(tmp_path: Path, tiny_rows: Path) -> None:
    """While one process holds the folder: exit 2, who holds it, and not one file of the run is changed."""
    folder = tmp_path / "run"
    config = tiny_config(tiny_rows, folder, "train.steps=2")
    train(config)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    with held_elsewhere(folder) as process, pytest.raises(UserError, match="another run is writing") as caught:
        train(tiny_config(tiny_rows, folder, "train.steps=4"))
    assert caught.value.exit_code == 2
    assert str(folder) in str(caught.value)
    assert f"process {process.pid} on " in str(caught.value)
    assert "hint:" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
    assert train(tiny_config(tiny_rows, folder, "train.steps=4")).step == 4  # the process is dead, and so is its lock


def test_a_dead_process_leaves_no_lock_to_its_children(tmp_path: Path) -> None:
    """A run that is killed while its loaders live on: the folder is free at once."""
    script = HOLD.replace(
        "    print", "    import os\n    if os.fork() == 0:\n        import time; time.sleep(30)\n    print"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="taken"), lock_folder(tmp_path, what="taken"):
        pass
    process.kill()
    process.wait()
    try:
        with lock_folder(tmp_path, what="taken"):
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", "no folder is named"),
        ("  ", "no folder is named"),
        ("a\0b", "no folder can have this name: .*null byte"),
        ("x" * 300, "no folder can have this name: File name too long"),
        ("runs/" + "x" * 300, "no folder can have this name: File name too long"),
        ("file", "is a file, not a folder"),
        ("file/below", "is a file, not a folder"),
        ("dangling", "is a file, not a folder"),
        ("/", "not a folder of its own"),
        ("data", "is, or holds, what the run reads"),
        (".", "is, or holds, what the run reads"),
        ("sub/../data", "is, or holds, what the run reads"),
    ],
)
def test_a_bad_output_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, words: str
) -> None:
    """The key, what was seen and a reason; nothing is opened (there is no data) and nothing is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "dangling").symlink_to("nothing")
    before = sorted(tmp_path.iterdir())
    config = tiny_config("data", "x", "train.steps=2")
    config = config.model_copy(update={"train": config.train.model_copy(update={"output": output})})
    with pytest.raises(UserError, match=rf"^train\.output: .*{words}") as caught:
        train(config)
    assert "seen:" in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_folder_is_no_run_folder(tmp_path: Path) -> None:
    """Training a Hugging Face folder into itself would put a run's files among the model's."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is, or holds, what the run reads"):
        check_run_folder(tiny_config("data", tmp_path / "model", f'model.name="{tmp_path / "model"}"'))
    inside = tmp_path / "model" / "run"
    assert check_run_folder(tiny_config("data", inside, f'model.name="{tmp_path / "model"}"')) == inside
