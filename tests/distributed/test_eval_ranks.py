"""Evaluation by several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from danlu.config.stages import EvalOptions
from danlu.train.evaluation import evaluate
from danlu.train.export import export
from danlu.train.loop import train
from distributed.pool import RankPool
from tiny import SENTENCES, tiny_config


def _evaluate(options: dict[str, Any], output: Path) -> dict[str, Any]:
    return evaluate(EvalOptions(**options), output)


def test_br_183_ranks_share_rows_and_questions(pool: RankPool, tiny_shards: Path, tmp_path: Path) -> None:
    """21 questions on 1, 2 or 4 ranks are 21 questions with the same answers in the same order, and one loss."""
    train(tiny_config(tiny_shards, tmp_path / "run", "train.steps=3", "model.vocab_size=320"))
    rows = [dict(zip(("prompt", "completion"), line.split(" is "), strict=True)) for line in SENTENCES[:21]]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = {
        "model": str(tmp_path / "run"), "data": str(tiny_shards), "questions": str(tmp_path / "qa.jsonl"),
        "batch_size": 2, "max_new_tokens": 8, "device": "cpu",
    }  # fmt: skip
    alone = evaluate(EvalOptions(**options), tmp_path / "1" / "eval.json")
    answers = (tmp_path / "1" / "predictions.jsonl").read_text(encoding="utf-8")
    assert len(answers.splitlines()) == alone["questions"]["all"]["questions"] == 21
    for ranks in (2, 4):
        results = pool.run(ranks, _evaluate, options, tmp_path / str(ranks) / "eval.json")
        _check(results, alone)
        assert (tmp_path / str(ranks) / "predictions.jsonl").read_text(encoding="utf-8") == answers


def _check(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for result in results:
        assert result["questions"] == alone["questions"]
        assert result["held_out"]["loss"] == pytest.approx(alone["held_out"]["loss"], rel=1e-6)
        assert result["held_out"]["tokens"] == alone["held_out"]["tokens"]


@pytest.mark.timeout(120)
def test_a_model_spread_over_ranks_answers_like_a_whole_one(pool: RankPool, tiny_shards: Path, tmp_path: Path) -> None:
    """Stages, heads and vocabulary on 2 or 4 ranks: the answers and loss of one, from a run and an HF folder."""
    train(tiny_config(tiny_shards, tmp_path / "run", "train.steps=8", "model.vocab_size=323"))
    export(tmp_path / "run", tmp_path / "hf", verify=False)
    rows = [dict(zip(("prompt", "completion"), line.split(" is "), strict=True)) for line in SENTENCES[:7]]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = {
        "data": str(tiny_shards), "questions": str(tmp_path / "qa.jsonl"), "batch_size": 3, "max_new_tokens": 8,
        "device": "cpu",
    }  # fmt: skip
    for model in ("run", "hf"):
        options["model"] = str(tmp_path / model)
        alone = evaluate(EvalOptions(**options), tmp_path / model / "1" / "eval.json")
        assert alone["questions"]["answers_without_end"] > 0, "something was generated"
        said = (tmp_path / model / "1" / "predictions.jsonl").read_text(encoding="utf-8")
        for ranks, split in ((2, {"pp": 2}), (2, {"tp": 2}), (4, {"pp": 2, "tp": 2}), (4, {"pp": 2})):
            output = tmp_path / model / f"{ranks}-{len(split)}-{'pp' in split}" / "eval.json"
            _check(pool.run(ranks, _evaluate, {**options, **split}, output), alone)
            assert output.with_name("predictions.jsonl").read_text(encoding="utf-8") == said
