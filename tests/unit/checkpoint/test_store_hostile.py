"""BR-245 for checkpoints: nothing in a checkpoint folder can make danlu run code; each attempt names its file.

Every attack tries to create a marker file. The pickles are written by hand where Python's pickler would not write them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from danlu.base.errors import UserError
from danlu.checkpoint.store import Checkpoint, CheckpointStore, load_tensors, open_checkpoint, tensor_names
from danlu.parallel.mesh import open_world
from danlu.train.run_folder import find_resume


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    """A sound checkpoint with one tensor, in a world that is still open."""
    with open_world(device="cpu") as world, CheckpointStore(tmp_path / "run", group=world.checkpoint_group) as store:
        store.save(1, {"x": torch.ones(3)}, {})
        store.wait()
        latest = store.latest()
        assert latest is not None
        yield latest


class _Run:
    """Unpickling calls ``function(*args)``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def attacks(marker: Path) -> dict[str, bytes]:
    touch = f"open({str(marker)!r}, 'w')"
    system = f"touch {marker}"

    def by_name(module: str, name: str, argument: str) -> bytes:
        """STACK_GLOBAL with any (also a dotted) name, called with one string."""
        text = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
        return (
            b"\x80\x04"
            + text
            + b"\x93"
            + b"X"
            + len(argument.encode()).to_bytes(4, "little")
            + argument.encode()
            + b"\x85R."
        )

    metadata = "torch.distributed.checkpoint.metadata"
    return {
        "os.system": pickle.dumps(_Run(os.system, system)),
        "eval": pickle.dumps(_Run(eval, touch)),
        "dotted from an allowed module": by_name(metadata, "os.system", system),
        "dotted from an allowed class": by_name(metadata, "Metadata.__init__.__globals__", system),
        "what an allowed module imports": by_name(metadata, "dataclass", system),
        "torch.load": by_name("torch", "load", str(marker)),
        "a dotted torch dtype": by_name("torch", "float32.__class__", system),
        "getattr": by_name("builtins", "getattr", "x"),
        "protocol 0": b"cos\nsystem\n(S'" + system.encode() + b"'\ntR.",
        "instance opcode": b"(S'" + system.encode() + b"'\nios\nsystem\n.",
        "persistent id": b"Pos.system\n.",
        "extension registry": b"\x82\x01.",
    }


NAMES = list(attacks(Path("x")))


@pytest.mark.parametrize("name", NAMES)
def test_br_245_a_hostile_metadata_pickle_is_refused(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """Listing and loading both refuse, name the file, and the marker is not there."""
    marker = tmp_path / "marker"
    (checkpoint.folder / ".metadata").write_bytes(attacks(marker)[name])
    for read in (tensor_names, lambda saved: load_tensors(saved, {"x": torch.zeros(3)})):
        with pytest.raises(UserError) as caught:
            read(checkpoint)
        assert str(caught.value).startswith(str(checkpoint.folder / ".metadata"))
    assert not marker.exists()


def test_br_245_the_attacks_would_work_on_a_plain_unpickler(tmp_path: Path) -> None:
    """The marker test can fail: plain pickle runs the first attack."""
    marker = tmp_path / "marker"
    pickle.loads(attacks(marker)["os.system"])
    assert marker.exists()


def test_br_245_pickled_objects_in_a_checkpoint_are_refused(tmp_path: Path) -> None:
    """Object entries, which DCP gives to a free torch.load, are refused unread; a plain DCP reader runs them."""
    marker, folder = tmp_path / "marker", tmp_path / "step-00000001"
    with open_world(device="cpu"):
        dcp.save({"x": torch.ones(3), "evil": _Run(os.system, f"touch {marker}")}, checkpoint_id=folder)
        for tensors in ({"x": torch.zeros(3)}, {"x": torch.zeros(3), "evil": torch.zeros(1)}):
            with pytest.raises(UserError, match="pickled objects") as caught:
                load_tensors(Checkpoint(folder, {}), tensors)
            assert "evil" in str(caught.value)
        assert not marker.exists()
        dcp.load({"evil": None}, checkpoint_id=folder)
    assert marker.exists()


@pytest.mark.parametrize("name", ["os.system", "eval"])
def test_br_245_a_hostile_tensor_file_is_refused(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """A data file that holds a pickle instead of a tensor is read weights-only: refused, not run."""
    marker = tmp_path / "marker"
    for path in checkpoint.folder.glob("*.distcp"):
        path.write_bytes(attacks(marker)[name].ljust(path.stat().st_size, b"."))
    unlisted = Checkpoint(checkpoint.folder, {"format": 1, "step": 1})  # who can write the file can write the record
    for attacked, answer in ((checkpoint, "is damaged"), (unlisted, "cannot be read")):
        with pytest.raises(UserError, match=answer):
            load_tensors(attacked, {"x": torch.zeros(3)})
    assert not marker.exists()


@pytest.mark.parametrize(
    "files", [[], {"../x": {"bytes": 1, "crc32": 1}}, {"x": 3}, {"x": {"bytes": "1", "crc32": 1}}, {"x": {"bytes": 1}}]
)
def test_a_hostile_list_of_files_is_refused(checkpoint: Checkpoint, files: Any) -> None:
    """Names outside the folder, or no checksums: the record is refused by name."""
    with pytest.raises(UserError, match=r"danlu\.json: not the record of a checkpoint"):
        load_tensors(Checkpoint(checkpoint.folder, {**checkpoint.record, "files": files}), {"x": torch.zeros(3)})


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", b"]\x94.", b"\x80\x04N.", b"\x80\x04}\x94.", bytes(50)])
def test_br_245_damaged_metadata_is_refused_in_words(checkpoint: Checkpoint, content: bytes) -> None:
    """Whatever the bytes are, the answer is an error that names the file, never a traceback."""
    (checkpoint.folder / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata"):
        tensor_names(checkpoint)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"format": 1}', b'{"format": 1, "step": "1"}',
     b'{"format": 1, "step": -1}', b'{"format": 1, "step": null}', b'{"format": {"__reduce__": 1}, "step": 1}'],
)  # fmt: skip
def test_br_245_a_hostile_record_is_refused(checkpoint: Checkpoint, content: bytes) -> None:
    """Any bytes in danlu.json: a UserError that names the folder."""
    (checkpoint.folder / "danlu.json").write_bytes(content)
    with pytest.raises(UserError, match="step-00000001"):
        open_checkpoint(checkpoint.folder)


@pytest.mark.parametrize(
    "fields", ["", '"samples_seen": "1"', '"samples_seen": true', '"samples_seen": 1, "identity": []']
)
def test_br_245_a_record_without_what_resuming_needs_is_refused(tmp_path: Path, fields: str) -> None:
    """A checkpoint that is no training run's is refused before anything is built."""
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "danlu.json").write_text('{"format": 1, "step": 1' + (f", {fields}" if fields else "") + "}")
    for resume in ("auto", str(folder)):
        with pytest.raises(UserError, match="not the record of a training run"):
            find_resume(tmp_path, resume)
