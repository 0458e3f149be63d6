"""The quickstart, done by a test: every block in order, with fewer questions and steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import GUIDE, Block, Page

SMALLER = {
    "danlu data finance": "--train 48 --validation 24 --test 24 --documents 4",
    "danlu data tokenizer": "vocab_size=300",
    "danlu train": "train.epochs=1 model.hidden_size=32 model.num_layers=1 metrics.tensorboard=false",
    "danlu eval": "--limit 8 --max-new-tokens 4",
    "danlu chat": "--max-new-tokens 4",
}
"""Words that are added to the page's commands so that the test takes seconds; later words win."""


def shorten(block: Block) -> str:
    """Return a shell block with `SMALLER` applied."""
    lines = []
    for line in block.text.splitlines():
        extra = next((words for start, words in SMALLER.items() if line.startswith(start)), "")
        lines.append(f"{line} {extra}".rstrip())
    return "\n".join(lines)


def is_setup(block: Block) -> bool:
    """Return whether a block prepares the environment, which a test has already."""
    return block.text.startswith(("make ", "export PATH"))


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path: Path) -> None:
    """Every command ends well, and what the page promises is there afterwards."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    printed: list[str] = []
    blocks = [block for block in Page(GUIDE / "quickstart.md").blocks if not is_setup(block)]
    for block in blocks:
        if block.language == "toml":
            (tmp_path / block.text.split()[1]).write_text(block.text, encoding="utf-8")
            continue
        words = ["bash", "-ec", shorten(block)] if block.language == "bash" else [sys.executable, "-c", block.text]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{block.where}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    output = "\n".join(printed)
    assert "targets are between [[ and ]]" in output
    assert "majority" in output
    assert "logits within" in output
    for name in ("run/report.html", "run/eval.json", "hf/model.safetensors", "from-python/metrics.jsonl"):
        assert (tmp_path / "work" / name).is_file(), name
