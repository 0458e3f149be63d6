"""`danlu train` as people run it: signals, ranks that fail, two jobs on a machine; all under a watchdog."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from danlu.checkpoint.store import find_checkpoints, open_checkpoint
from danlu.config.load import to_toml
from danlu.data import shards
from danlu.train.loop import train
from distributed.pool import RankPool
from tiny import random_rows, read_metrics, tiny_config, write_rows

pytestmark = pytest.mark.timeout(180)
ENDLESS = ("train.steps=100000", "schedule.kind=constant", "model.dropout=0.1")


@contextmanager
def danlu(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a process group of its own; what is left of it at the end is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "danlu", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def write_config(data: Path, output: Path, *words: str) -> Path:
    """Write a config file for ``danlu train`` and return its path."""
    path = output.with_suffix(".toml")
    path.write_text(to_toml(tiny_config(data, output, *words)), encoding="utf-8")
    return path


def wait_for_steps(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[1]
        path = folder / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= steps:
            return
        time.sleep(0.05)
    pytest.fail("the run makes no steps")


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder)]


def continue_run(data: Path, output: Path, steps: int) -> None:
    """Train up to ``steps`` (a job for the pool)."""
    train(tiny_config(data, output, *ENDLESS, f"train.steps={steps}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "number", "reached"),
    [
        pytest.param(1, signal.SIGTERM, "one", id="alone-SIGTERM"),
        pytest.param(1, signal.SIGINT, "group", id="alone-ctrl-c"),
        pytest.param(1, signal.SIGTERM, "group", id="alone-group-SIGTERM"),
        pytest.param(2, signal.SIGTERM, "one", id="two-SIGTERM"),
        pytest.param(2, signal.SIGINT, "all", id="two-ctrl-c"),
        pytest.param(2, signal.SIGTERM, "all", id="two-all-SIGTERM"),
    ],
)
def test_a_signal_saves_and_exits_with_0(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, ranks: int, number: signal.Signals, reached: str
) -> None:
    """Whether it reaches the command, its group or every process (loaders too): saved, exit 0, resumed bit for bit."""
    folder = tmp_path / "run"
    config = write_config(tiny_rows, folder, *ENDLESS, "data.num_workers=1")
    with danlu("train", str(config), "--nproc", str(ranks)) as process:
        wait_for_steps(process, folder, 3)
        if reached == "one":
            process.send_signal(number)
        elif reached == "group":
            os.killpg(process.pid, number)
        else:  # as a scheduler does; last the launcher, which passes on what its ranks have had
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "stopping after step" in err
    checkpoint = open_checkpoint(find_checkpoints(folder / "checkpoints")[-1])
    assert checkpoint.step == len(losses(folder)) >= 3
    total = checkpoint.step + 3
    pool.run(ranks, continue_run, tiny_rows, folder, total)
    pool.run(ranks, continue_run, tiny_rows, tmp_path / "whole", total)
    assert losses(folder) == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_signal_before_the_ranks_can_save_ends_the_job(tmp_path: Path, tiny_rows: Path) -> None:
    """SIGTERM while the ranks are still starting: the job ends and says by what, and is no success."""
    config = write_config(tiny_rows, tmp_path / "run", *ENDLESS)
    with danlu("train", str(config), "--nproc", "2") as process:
        end = time.monotonic() + 60
        while not psutil.Process(process.pid).children() and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "SIGTERM" in err
    assert "Traceback" not in err


def flip_row(data: Path, row: int) -> None:
    """Damage one row of a data set; its shard keeps its size."""
    index = np.load(data / shards.INDEX)
    shard = data / shards.shard_name(0)
    content = bytearray(shard.read_bytes())
    content[int(index["tokens_at"][row])] ^= 1
    shard.write_bytes(content)


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_with_its_cause_last(tmp_path: Path) -> None:
    """A damaged row that only rank 1 reads: all ranks end within 15 seconds of it, exit 2, the cause last on stderr."""
    data = write_rows(tmp_path / "data", random_rows(40, seed=0))
    flip_row(data, 31)
    words = ("data.shuffle=false", "train.global_batch_size=2", "train.micro_batch_size=1")
    config = write_config(data, tmp_path / "run", *ENDLESS, *words, "checkpoint.every_steps=4")
    with danlu("train", str(config), "--nproc", "2") as process:
        wait_for_steps(process, tmp_path / "run", 14)
        began = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 15
    assert process.returncode == 2, err
    last = err[err.rindex("failed first") - len("rank 1 ") :]
    assert last.startswith("rank 1 failed first (exit code 2)")
    assert "damaged row: its checksum is wrong" in last
    assert str(data) in last
    assert "Connection" not in last
    assert len(losses(tmp_path / "run")) == 15
    assert find_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000012"


@pytest.mark.slow
def test_br_037_a_run_that_diverges_exits_with_1(tmp_path: Path, tiny_rows: Path) -> None:
    """A non-finite loss on two ranks: exit 1, step and samples in the last message, no traceback."""
    words = ("train.steps=50", "optimizer.learning_rate=1e30")
    config = write_config(tiny_rows, tmp_path / "run", *words)
    with danlu("train", str(config), "--nproc", "2") as process:
        _, err = process.communicate(timeout=90)
    assert process.returncode == 1, err
    last = err[err.rindex("failed first") :]
    assert "loss or gradient is not finite at step" in last
    assert "Traceback" not in err


@pytest.mark.slow
def test_br_217_two_jobs_on_one_machine(tmp_path: Path, tiny_rows: Path) -> None:
    """Two 2-rank jobs started at once both finish; each prints one JSON document on stdout and nothing else there."""
    configs = [write_config(tiny_rows, tmp_path / name, "train.steps=3") for name in ("a", "b")]
    with (
        danlu("train", str(configs[0]), "--nproc", "2", "--json") as first,
        danlu("train", str(configs[1]), "--nproc", "2", "--json") as second,
    ):
        answers = [process.communicate(timeout=120) for process in (first, second)]
    for process, (out, err), name in zip((first, second), answers, ("a", "b"), strict=True):
        assert process.returncode == 0, err
        result = json.loads(out)
        assert (result["step"], result["finished"], result["folder"]) == (3, True, str(tmp_path / name))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_wrong_input_exits_with_2_before_any_rank_starts(tmp_path: Path, tiny_rows: Path) -> None:
    """A batch that does not divide by the ranks: exit 2, key and remedy on stderr, nothing on stdout, no run folder."""
    config = write_config(tiny_rows, tmp_path / "run", "train.steps=3", "train.global_batch_size=7")
    with danlu("train", str(config), "--nproc", "2") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "train.global_batch_size" in err
    assert "such as 6 or 8" in err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_all_ranks_find_wrong_is_said_once(tmp_path: Path) -> None:
    """Rows longer than the model's positions, on two ranks: one message in the normal form, exit 2, no run folder."""
    data = write_rows(tmp_path / "data", random_rows(8, seed=0), sequence_length=80)
    config = write_config(data, tmp_path / "run", "train.steps=3")
    with danlu("train", str(config), "--nproc", "2") as process:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 2, err
    assert err.startswith(f"error: {data}: the rows are longer than the model's positions\n")
    assert err.count("the rows are longer") == 1
    assert "[rank" not in err
    assert out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_jobs_into_one_folder(tmp_path: Path, tiny_rows: Path) -> None:
    """The second of two 2-rank jobs is refused with exit 2; the first goes on and saves."""
    config = write_config(tiny_rows, tmp_path / "run", *ENDLESS)
    with danlu("train", str(config), "--nproc", "2") as first:
        wait_for_steps(first, tmp_path / "run", 2)
        with danlu("train", str(config), "--nproc", "2") as second:
            _, err = second.communicate(timeout=90)
        assert second.returncode == 2, err
        assert err.startswith(f"error: {tmp_path / 'run'}: another run is writing into this folder")
        assert err.count("another run") == 1
        first.send_signal(signal.SIGTERM)
        _, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert find_checkpoints(tmp_path / "run" / "checkpoints")
