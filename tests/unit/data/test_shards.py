"""Shards are plain WebDataset tars, and a damaged or hostile data set is refused by name."""

from __future__ import annotations

import gc
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset

from danlu.base.errors import RunError, UserError
from danlu.data import shards
from danlu.data.batch import IGNORE, shift_labels
from danlu.data.dataset import PackedDataset
from tiny import write_rows

ROWS = [[[5, 6, 7], [8, 9]], [[300, 301, 302, 303]]]


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset's
def test_webdataset_and_tarfile_read_the_shards(tmp_path: Path) -> None:
    """The `webdataset` library decodes every row to what was written; `tarfile` sees plain files only."""
    folder = write_rows(tmp_path / "d", ROWS, per_shard=1)
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode())
    assert [sample["tokens.npy"].tolist() for sample in samples] == [[5, 6, 7, 8, 9], [300, 301, 302, 303]]
    assert [sample["lengths.npy"].tolist() for sample in samples] == [[3, 2], [4]]
    assert samples[0]["mask.npy"].tolist() == [False, True, True, False, True]
    gc.collect()  # webdataset leaves its files to the collector
    with tarfile.open(urls[0]) as tar:
        members = tar.getmembers()
        assert all(member.isreg() and member.mtime == member.uid == 0 for member in members)
        assert np.load(io.BytesIO(tar.extractfile(members[0]).read())).tolist() == [5, 6, 7, 8, 9]


def test_rows_are_read_at_random(tmp_path: Path) -> None:
    """Any rows in any order, across shards, come padded with ids, positions and documents."""
    dataset = PackedDataset(write_rows(tmp_path / "d", ROWS, per_shard=1, sequence_length=8))
    rows = dataset.rows([1, 0, 0])
    assert rows.tokens_BS[1].tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert rows.positions_BS[1].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert rows.document_ids_BS[1].tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert rows.tokens_BS[0, :4].tolist() == [300, 301, 302, 303]
    assert dataset.target_bytes([0, 1]) == 6
    dataset.verify()


def test_br_141_143_no_document_predicts_the_next(tmp_path: Path) -> None:
    """Documents of 3 and 5 tokens have 2 + 4 labels; the second one's first token is no label."""
    dataset = PackedDataset(write_rows(tmp_path / "d", [[[10, 11, 12], [20, 21, 22, 23, 24]]], sequence_length=8))
    rows = dataset.rows([0])
    labels = shift_labels(rows.tokens_BS, np.ones_like(rows.mask_BS), rows.document_ids_BS)
    assert labels.tolist() == [[11, 12, IGNORE, 21, 22, 23, 24, IGNORE]]


def test_br_143_first_token_of_a_document_is_no_target(tmp_path: Path) -> None:
    """Ids [0,1,2,A,B,C] give 4 targets."""
    dataset = PackedDataset(write_rows(tmp_path / "d", [[[0, 1, 2], [7, 8, 9]]], sequence_length=8))
    rows = dataset.rows([0])
    labels = shift_labels(rows.tokens_BS, rows.mask_BS, rows.document_ids_BS)
    assert labels.tolist() == [[1, 2, IGNORE, 8, 9, IGNORE, IGNORE, IGNORE]]
    assert int(dataset.index["target_tokens"][0]) == 4


def test_data_set_survives_pickling(tmp_path: Path) -> None:
    """A pickled data set (spawned workers) opens again by its folder."""
    dataset = pickle.loads(pickle.dumps(PackedDataset(write_rows(tmp_path / "d", ROWS))))
    assert len(dataset) == 2


@pytest.mark.parametrize("damage", ["cut", "missing", "flipped"])
def test_br_173_damaged_shard(tmp_path: Path, damage: str) -> None:
    """Of 3 shards the second is cut, gone or flipped: strict names shard and byte, tolerant keeps the good rows."""
    folder = write_rows(tmp_path / "d", [[[n, n, n]] for n in range(12)], per_shard=4)
    path = folder / "shard-000001.tar"
    content = path.read_bytes()
    first = int(PackedDataset(folder).index["tokens_at"][4])
    size = int(len(content) * 0.6)
    if damage == "cut":
        path.write_bytes(content[:size])
        expected = f"shard-000001.tar: shard differs from the manifest from byte {size} on"
    elif damage == "missing":
        path.unlink()
        expected = "shard-000001.tar: shard is missing"
    else:
        path.write_bytes(content[:first] + b"\xff" + content[first + 1 :])
        expected = f"shard-000001.tar: row at byte {first}"
    with pytest.raises(UserError, match=expected):
        PackedDataset(folder).rows(range(12))
    tolerant = PackedDataset(folder, on_corrupt="skip")
    rows = tolerant.rows(range(len(tolerant)))
    good = sorted(set(rows.tokens_BS[rows.document_ids_BS[:, 0] >= 0, 0].tolist()))
    lost = 12 - len(good)
    assert tolerant.num_corrupt == lost
    assert {0, 1, 2, 3, 8, 9, 10, 11} <= set(good)
    assert lost == {"cut": 2, "missing": 4, "flipped": 1}[damage]


def test_verify_finds_damage_outside_the_rows(tmp_path: Path) -> None:
    """Hashing finds a flipped byte that no row covers."""
    folder = write_rows(tmp_path / "d", ROWS)
    path = folder / "shard-000000.tar"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(UserError, match="hash is wrong"):
        PackedDataset(folder).verify()


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"format_version": 1}', '{"format_version": 99}'])
def test_br_176_manifest_missing_or_unreadable(tmp_path: Path, text: str | None) -> None:
    """A data set without a whole manifest of this version is an error, never a guess."""
    folder = write_rows(tmp_path / "d", ROWS)
    (folder / "manifest.json").unlink()
    if text is not None:
        (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest|not a data set|version|JSON"):
        PackedDataset(folder)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    """A wrong path says so."""
    with pytest.raises(UserError, match="no such data set folder"):
        PackedDataset(tmp_path / "nothing")


class Marker:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


def test_br_245_index_is_never_unpickled(tmp_path: Path) -> None:
    """An index or a shard member that holds a pickle is refused and not executed."""
    folder = write_rows(tmp_path / "d", ROWS)
    np.save(folder / "index.npy", np.array([Marker(tmp_path / "marker")], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"index\.npy"):
        PackedDataset(folder)
    (folder / "index.npy").write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    with pytest.raises(UserError, match=r"index\.npy"):
        PackedDataset(folder)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("field", ["tokens_at", "mask_at", "lengths_at", "num_tokens", "num_documents", "shard"])
def test_br_246_forged_index_cannot_point_elsewhere(tmp_path: Path, field: str) -> None:
    """Offsets, counts and shard numbers beyond what is there are refused at open."""
    folder = write_rows(tmp_path / "d", ROWS)
    index = np.load(folder / "index.npy")
    index[field][1] = np.iinfo(index[field].dtype).max // 4
    np.save(folder / "index.npy", index)
    with pytest.raises(UserError, match="index"):
        PackedDataset(folder)


def test_br_246_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    """A shard name that climbs out of the folder is not followed."""
    outside = write_rows(tmp_path / "outside", ROWS)
    folder = write_rows(tmp_path / "d", ROWS)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["name"] = "../outside/shard-000000.tar"
    (folder / "shard-000000.tar").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert (outside / "shard-000000.tar").is_file()
    with pytest.raises(UserError, match="missing"):
        PackedDataset(folder)


def test_failed_write_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """A write that the system refuses is a `RunError` naming the file; the old file is untouched."""
    with pytest.raises(RunError, match=r"x/a: cannot write"):
        shards.write_file(tmp_path / "x" / "a", b"new")
    (tmp_path / "b").mkdir()
    with pytest.raises(RunError, match="cannot write"):
        shards.write_file(tmp_path / "b", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_token_dtype_is_the_narrowest() -> None:
    """Two bytes hold 65,536 ids; one more needs four."""
    assert shards.token_dtype(65_536).itemsize == 2
    assert shards.token_dtype(65_537).itemsize == 4
