"""What all tests share: one thread a process, and tiny data made once a session."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; ranks and subprocesses inherit it

from pathlib import Path

import pytest

from danlu.config.data_build import DataBuild
from danlu.data.build import build
from danlu.data.tokenizer_train import train_tokenizer
from tiny import SENTENCES, random_rows, write_rows


@pytest.fixture(scope="session")
def tiny_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 rows of one to three documents of uneven lengths, token ids below 64."""
    return write_rows(tmp_path_factory.mktemp("rows") / "data", random_rows(28, seed=1))


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 320 entries."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(SENTENCES, folder, vocab_size=320)
    return folder


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """`SENTENCES` as `danlu data build` packs them into rows of 32 tokens."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "text.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    options = {"text_unit": "line", "sequence_length": 32, "num_workers": 1, "tokenizer": str(tiny_tokenizer)}
    build(DataBuild(inputs=str(folder / "text.txt"), output=str(folder / "data"), **options), progress=False)
    return folder / "data"
