"""Rates, records and their survival of a resume."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from danlu.train.metrics import MetricsWriter, Rates, truncate_metrics

RECORD = {"loss": 2.5, "lr": 1e-3, "tokens_per_second": 640.0}


def test_br_260_throughput_is_that_of_the_steps_since_the_last_record() -> None:
    """64 tokens in 0.1 s are 640 tokens/s at every step, not a running total over the last step's time."""
    rates = Rates(num_devices=1, flops_per_token=1.0, peak_flops=None)
    for _ in range(5):
        rates.add(tokens=64, seconds=0.1, data_wait=0.02)
        taken = rates.take()
        assert taken["tokens_per_second"] == pytest.approx(640.0)
        assert taken["step_seconds"] == pytest.approx(0.1)
        assert taken["data_wait_seconds"] == pytest.approx(0.02)


def test_several_steps_between_records_are_averaged() -> None:
    """With a record every third step, all three steps' tokens and seconds count."""
    rates = Rates(num_devices=1, flops_per_token=1.0, peak_flops=None)
    for tokens, seconds in ((64, 0.1), (32, 0.1), (0, 0.2)):
        rates.add(tokens=tokens, seconds=seconds, data_wait=0.0)
    assert rates.take()["tokens_per_second"] == pytest.approx(96 / 0.4)


def test_br_261_per_device_rates_divide_by_all_devices_and_mfu_by_the_peak() -> None:
    """Tokens are those of the whole job; per device and mfu divide by the number of devices once."""
    rates = Rates(num_devices=4, flops_per_token=6.0, peak_flops=2400.0)
    rates.add(tokens=800, seconds=2.0, data_wait=0.0)
    taken = rates.take()
    assert taken["tokens_per_second"] == 400.0
    assert taken["tokens_per_second_per_gpu"] == 100.0
    assert taken["mfu"] == pytest.approx(100 * 6 / 2400)
    assert Rates(num_devices=1, flops_per_token=1.0, peak_flops=None).take()["mfu"] is None


def writer(folder: Path | None, **options: object) -> MetricsWriter:
    settings = {"total_steps": 10, "tensorboard": False, "progress": False} | options
    return MetricsWriter(folder, **settings)  # type: ignore[arg-type]


def read(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_losses_keep_their_last_bit_and_nan_becomes_null(tmp_path: Path) -> None:
    """What is written reads back as the same float; JSON has no NaN."""
    loss = 1 / 3 + 1e-16
    with writer(tmp_path) as metrics:
        metrics.write({**RECORD, "step": 1, "loss": loss, "grad_norm": math.nan, "mfu": None, "skipped": True})
        metrics.write({"step": 1, "eval_loss": math.inf})
    assert read(tmp_path)[0]["loss"] == loss
    assert read(tmp_path)[0]["grad_norm"] is None
    assert read(tmp_path)[0]["skipped"] is True
    assert read(tmp_path)[1] == {"step": 1, "eval_loss": None}


def test_a_resumed_run_drops_the_steps_it_will_do_again(tmp_path: Path) -> None:
    """Records after the checkpoint, and a line that a kill cut off, are gone; no step appears twice."""
    with writer(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.write({**RECORD, "step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    with writer(tmp_path, first_step=3) as metrics:
        metrics.write({**RECORD, "step": 4})
    assert [record["step"] for record in read(tmp_path)] == [1, 2, 3, 4]


def test_truncating_a_file_that_is_not_there_is_fine(tmp_path: Path) -> None:
    """A first run has no metrics yet."""
    truncate_metrics(tmp_path / "metrics.jsonl", 0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_ranks_that_do_not_write_leave_nothing(tmp_path: Path) -> None:
    """Without a folder every call does nothing."""
    with writer(None) as metrics:
        metrics.write({**RECORD, "step": 1})
    assert list(tmp_path.iterdir()) == []


def test_progress_lines_are_throttled_and_end_with_the_last_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First and last step always speak, in between at most every five seconds; the ETA follows the clock."""
    now = [0.0]
    monkeypatch.setattr(logging.getLogger("danlu"), "propagate", True)
    with caplog.at_level(logging.INFO, "danlu"), writer(tmp_path, clock=lambda: now[0]) as metrics:
        for step in range(1, 11):
            now[0] += 2.0
            metrics.write({**RECORD, "step": step})
    # pytest hears a logger twice, once itself and once through the root, if it did not propagate when the test began
    spoken = [record.getMessage() for record in {id(record): record for record in caplog.records}.values()]
    assert [text.split()[1] for text in spoken] == ["1/10", "4/10", "7/10", "10/10"]
    assert "ETA 0:12" in spoken[1]
    assert "640 tokens/s" in spoken[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside tensorboard
def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    """The event file is there and not empty; it is another view of the same records."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with writer(tmp_path, tensorboard=True) as metrics:
        for step in (1, 2):
            metrics.write({**RECORD, "step": step, "loss": 3.0 - step})
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
