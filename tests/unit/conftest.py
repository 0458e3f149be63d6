"""A tiny model that has learned a few answers by heart, for the tests of what uses trained models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danlu.config.data_build import DataBuild
from danlu.config.schema import Config
from danlu.data.build import build
from danlu.data.tokenizer_train import train_tokenizer
from danlu.train.loop import train

QUESTIONS = [
    {
        "prompt": "Q: What is the fee of the Blue card?\nA: ",
        "completion": "1,250 yuan",
        "task": "fee",
        "language": "en",
    },
    {"prompt": "Q: What is the fee of the Red card?\nA: ", "completion": "80 yuan", "task": "fee", "language": "en"},
    {"prompt": "问：蓝卡的年费是多少？\n答：", "completion": "1250元", "task": "fee", "language": "zh"},
    {"prompt": "Q: May it be cancelled?\nA: ", "completion": "Yes", "task": "yes_no", "language": "en"},
    {"prompt": "Q: Is it for students?\nA: ", "completion": "No", "task": "yes_no", "language": "en"},
    {"prompt": "问：可以提前还款吗？\n答：", "completion": "可以", "task": "yes_no", "language": "zh"},
]
"""Two tasks in two languages."""

TINY = {"name": "tiny", "num_layers": 2, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 96,
        "vocab_size": 320, "max_positions": 96, "tied_embeddings": True}  # fmt: skip


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as jsonl."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def question_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The questions as jsonl."""
    return write_lines(tmp_path_factory.mktemp("questions") / "qa.jsonl", QUESTIONS)


@pytest.fixture(scope="session")
def qa_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with the ChatML template; most Chinese characters are several tokens."""
    folder = tmp_path_factory.mktemp("qa_tokenizer")
    train_tokenizer([row["prompt"] + row["completion"] for row in QUESTIONS], folder, vocab_size=300)
    return folder


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory, question_file: Path, qa_tokenizer: Path) -> Callable[..., Path]:
    """Builds the questions into shards (options go to the build) and trains a tiny model; returns the run folder."""

    def make(steps: int, model: dict[str, Any] | None = None, **options: Any) -> Path:
        folder = tmp_path_factory.mktemp("run")
        settings = {"sequence_length": 96, "packing": "none", "num_workers": 1} | options
        build(
            DataBuild(inputs=str(question_file), output=str(folder / "data"), tokenizer=str(qa_tokenizer), **settings),
            progress=False,
        )
        config = Config(
            model=model or TINY,
            data={"train": str(folder / "data"), "num_workers": 0},
            optimizer={"learning_rate": 5e-3, "weight_decay": 0.0},
            train={"steps": steps, "output": str(folder / "run"), "device": "cpu"},
            metrics={"tensorboard": False, "progress": False, "log_every": 1000},
        )
        train(config)
        return folder / "run"

    return make


@pytest.fixture(scope="session")
def learned_run(make_run: Callable[..., Path]) -> Path:
    """A run that has learned the questions as plain text."""
    return make_run(120)


@pytest.fixture(scope="session")
def learned_chat_run(make_run: Callable[..., Path]) -> Path:
    """A run that has learned the questions as chats, with a system message."""
    return make_run(120, layout="chat", system="Be brief.")
