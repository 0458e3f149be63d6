"""kill -9 at random moments of a run that saves every step: nothing committed is lost, nothing partial is used."""

from __future__ import annotations

import random
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from danlu.checkpoint.store import find_checkpoints, open_checkpoint
from danlu.train.loop import train
from distributed.pool import CONTEXT
from tiny import last_tensors, read_tensors, tiny_config

KILLS = 15
"""For each of the two ways to save."""
WORDS = (
    "train.steps=100000", 'schedule.kind="constant"', "checkpoint.every_steps=1", "checkpoint.keep_last=2",
    "model.dropout=0.1", "model.hidden_size=128", "model.head_dim=32", "model.mlp_size=512",
)  # fmt: skip


def _train(data: Path, run: Path, stderr: Path, asynchronous: bool) -> None:
    sys.stderr = stderr.open("w", buffering=1)
    train(tiny_config(data, run, *WORDS, f"checkpoint.async_save={str(asynchronous).lower()}"))


def _wait_for_saving(checkpoints: Path, known: set[Path]) -> None:
    """Return when a folder appears that was not there when the process started."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if set(checkpoints.glob("step-*")) - known:
            return
        time.sleep(0.002)
    pytest.fail("the run does not save")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_br_061_kill_at_random_moments_while_saving(tmp_path: Path, tiny_rows: Path, asynchronous: bool) -> None:
    """Resumes use the newest committed step; all found ones load; the end is bit-equal to a run without kills."""
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    draw, newest, half_written = random.Random(asynchronous), 0, 0
    for kill in range(KILLS):
        stderr = tmp_path / f"stderr-{kill}.txt"
        process = CONTEXT.Process(target=_train, args=(tiny_rows, run, stderr, asynchronous))
        known = set(checkpoints.glob("step-*"))
        process.start()
        _wait_for_saving(checkpoints, known)
        time.sleep(draw.uniform(0.0, 0.15))
        process.kill()
        process.join()
        said = stderr.read_text()
        if newest:
            assert f"resumed from {checkpoints / f'step-{newest:08d}'}: step {newest} of" in said
        half_written += bool(list(checkpoints.glob("*.partial")))
        committed = [int(step) for step in re.findall(r"saved \S+step-(\d+)", said)]
        found = find_checkpoints(checkpoints)
        newest = open_checkpoint(found[-1]).step if found else 0
        assert newest >= max(committed, default=0)
        for path in found:
            tensors = read_tensors(path)
            assert float(tensors["optimizer.embedding.weight.step"]) == open_checkpoint(path).step
            assert all(bool(value.isfinite().all()) for value in tensors.values())
    assert half_written >= KILLS // 5, "the kills do not hit the saving; make the model larger"
    assert newest > 0
    train(tiny_config(tiny_rows, tmp_path / "reference", *WORDS, f"train.steps={newest}", "checkpoint.every_steps=0"))
    reference, survived = last_tensors(tmp_path / "reference", ""), last_tensors(run, "")
    assert reference.keys() == survived.keys()
    assert [name for name in reference if not torch.equal(reference[name], survived[name])] == []
