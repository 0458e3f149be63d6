"""One rank on a GPU is the run of the CPU: exact in fp32, close in bf16, with every way of sharding that one rank has.

Skipped where torch sees no CUDA device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from danlu.train.loop import train
from tiny import largest_difference, last_tensors, tiny_config

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
WORDS = ("train.steps=20", "optimizer.max_grad_norm=0.5", "schedule.warmup_steps=3", "optimizer.eps=1e-6")


def run(data: Path, output: Path, *words: str) -> dict[int, float]:
    return train(tiny_config(data, output, *WORDS, *words)).losses


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, tiny_rows: Path) -> tuple[Path, dict[int, float]]:
    """The same run in fp32 on the CPU."""
    folder = tmp_path_factory.mktemp("cpu") / "run"
    return folder, run(tiny_rows, folder)


@pytest.mark.parametrize("words", [(), ("train.micro_batch_size=2",), ("parallel.zero=3",), ("optimizer.fused=off",)])
def test_fp32_equals_the_cpu(
    tmp_path: Path, tiny_rows: Path, on_cpu: tuple[Path, dict[int, float]], words: tuple[str, ...]
) -> None:
    """Without TF32: losses to 1e-4 and final weights to 1e-3 over 20 steps, packed rows and epoch's edge included."""
    losses = run(tiny_rows, tmp_path / "run", 'train.device="cuda"', "precision.tf32=false", *words)
    for step, loss in on_cpu[1].items():
        assert losses[step] == pytest.approx(loss, rel=1e-4)
    assert largest_difference(last_tensors(tmp_path / "run"), last_tensors(on_cpu[0])) < 1e-3


@pytest.mark.parametrize("words", [(), ("parallel.zero=3",)])
def test_bf16_follows_fp32(
    tmp_path: Path, tiny_rows: Path, on_cpu: tuple[Path, dict[int, float]], words: tuple[str, ...]
) -> None:
    """bf16 compute with fp32 weights: every loss within 2 % of fp32's, and the run learns as much."""
    losses = run(tiny_rows, tmp_path / "run", 'train.device="cuda"', 'precision.compute_dtype="bf16"', *words)
    for step, loss in on_cpu[1].items():
        assert losses[step] == pytest.approx(loss, rel=2e-2)


def test_resume_on_a_gpu_is_bit_equal(tmp_path: Path, tiny_rows: Path) -> None:
    """Stopped after 4 of 8 steps with dropout, continued: the random state of the device comes back too."""
    words = ('train.device="cuda"', "model.dropout=0.1", "checkpoint.every_steps=4", "train.steps=8")
    whole = run(tiny_rows, tmp_path / "whole", *words)
    first = tmp_path / "whole" / "checkpoints" / "step-00000004"
    rest = train(tiny_config(tiny_rows, tmp_path / "rest", *WORDS, *words), resume=str(first)).losses
    assert rest == {step: loss for step, loss in whole.items() if step > 4}
