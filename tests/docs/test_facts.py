"""What the training page says about a run is what a run leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from danlu.config.schema import TrainSection
from danlu.train.loop import train
from docs.pages import GUIDE, GUIDE_ZH, ROOT, Page
from tiny import read_metrics, tiny_config


@pytest.fixture(scope="module")
def run(tiny_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with an evaluation, as the page describes it."""
    folder = tmp_path_factory.mktemp("docs") / "run"
    words = ("train.steps=1", "eval.held_out_fraction=0.1", "metrics.tensorboard=true")
    train(tiny_config(tiny_rows, folder, *words))
    return folder


@pytest.mark.parametrize("guide", [GUIDE, GUIDE_ZH], ids=["en", "zh"])
def test_every_metric_is_explained(run: Path, guide: Path) -> None:
    """The table of metrics.jsonl has the fields of a record, no more and no fewer, and so has the evaluations' list."""
    text = Page(guide / "training.md").text.partition("## metrics.jsonl")[2]
    step, evaluation = read_metrics(run)
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == set(step)
    assert set(re.findall(r"eval_\w+", text)) | {"step"} == set(evaluation)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_python_of_the_readme_runs_after_its_commands(name: str) -> None:
    """It trains and exports into folders of its own: none that a command before it has filled, and not the default."""
    blocks = Page(ROOT / name).blocks
    python = next(block.text for block in blocks if block.language == "python")
    written = set(re.findall(r'"output": "([^"]+)"', python) + re.findall(r'export\([^,]+, "([^"]+)"', python))
    assert len(written) == 2
    commands = " ".join(block.text for block in blocks if block.language == "bash").split()
    assert not written & {*commands, TrainSection().output}


@pytest.mark.parametrize("guide", [GUIDE, GUIDE_ZH], ids=["en", "zh"])
def test_the_run_folder_is_as_drawn(run: Path, guide: Path) -> None:
    """The drawing names what a run leaves; the report is the command's own last act."""
    drawing = next(block.text for block in Page(guide / "training.md").blocks if block.text.startswith("runs/support/"))
    drawn = {line.split()[0].partition("/")[0] for line in drawing.splitlines()[1:]}
    assert drawn == {path.name for path in run.iterdir()} | {"report.html"}
