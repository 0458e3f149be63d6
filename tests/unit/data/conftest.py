"""Small tokenizers and data sets for the tests of `danlu.data`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from danlu.base import env
from danlu.config.data_build import DataBuild
from danlu.data.build import build
from danlu.data.dataset import PackedDataset
from danlu.data.tokenizer import Tokenizer
from danlu.data.tokenizer_train import train_tokenizer
from tiny import write_rows

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("danlu", deadline=None)
hypothesis.settings.load_profile("danlu")

TEXTS = [
    "The card has not arrived yet. How long does a transfer take?",
    "我的卡还没有到，转账需要多长时间？请问手续费是多少？",
    "user assistant system Query: Intent: answer",
]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with the ChatML template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS * 3, folder, vocab_size=320)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    """The tokenizer of `tokenizer_folder`."""
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture
def numbered(tmp_path: Path) -> Callable[..., PackedDataset]:
    """Makes data sets whose row i holds one document that begins with token ``first + i``."""
    made = iter(range(100))

    def make(num_rows: int, *, first: int = 0, **options: Any) -> PackedDataset:
        rows = [[[first + i, 1, 2]] for i in range(num_rows)]
        return PackedDataset(write_rows(tmp_path / f"rows-{next(made)}", rows, sequence_length=8, **options))

    return make


@pytest.fixture
def run_build(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., dict[str, Any]]:
    """Builds ``inputs`` (a path or a name -> content mapping) into ``tmp_path / output`` and returns the manifest."""

    def run(inputs: Any, *, output: str = "out", **options: Any) -> dict[str, Any]:
        if isinstance(inputs, dict):
            for name, content in inputs.items():
                data = content if isinstance(content, bytes) else content.encode()
                (tmp_path / name).write_bytes(data)
            inputs = [str(tmp_path / name) for name in inputs]
        settings = {"sequence_length": 64, "num_workers": 1, "tokenizer": str(tokenizer_folder)} | options
        return build(DataBuild(inputs=inputs, output=str(tmp_path / output), **settings), progress=False)

    return run


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data, or skip."""
    folder = Path(env.get("DANLU_DATA") or Path(__file__).parents[4] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no real data: set DANLU_DATA")
    return folder
