"""Evaluation of a model as a whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danlu.base.errors import UserError
from danlu.config.data_build import DataBuild
from danlu.config.stages import EvalOptions
from danlu.data.build import build
from danlu.train.evaluation import Answer, evaluate, generate_answers, grade
from danlu.train.load import load_model
from danlu.train.questions import Asked


def ask(model: Path, questions: Path, output: Path | None = None, **options: Any) -> dict[str, Any]:
    result = evaluate(EvalOptions(model=str(model), questions=str(questions), **options), output)
    found: dict[str, Any] = result["questions"]
    return found


@pytest.fixture(scope="session")
def fresh_run(make_run: Callable[..., Path]) -> Path:
    """A run that has hardly begun."""
    return make_run(1)


@pytest.mark.parametrize("run", ["learned_run", "learned_chat_run"])
def test_learned_answers_score_one(run: str, question_file: Path, request: pytest.FixtureRequest) -> None:
    """A model that has learned the answers gives them all, as plain text and as a chat, and stops after each."""
    result = ask(request.getfixturevalue(run), question_file)
    assert result["all"]["strict"]["value"] == 1.0
    assert result["answers_without_end"] == result["prompts_too_long"] == 0
    assert {score["name"]: score["questions"] for score in result["tasks"]} == {"fee": 3, "yes_no": 3}
    assert {score["name"]: score["questions"] for score in result["languages"]} == {"en": 4, "zh": 2}


def test_loss_and_scores_stand_side_by_side(make_run: Callable[..., Path], question_file: Path) -> None:
    """Measured one after the other, in either order: the file holds both; other weights begin anew."""
    run = make_run(1)
    data = (str(run.parent / "data"),)
    file = run / "eval.json"
    evaluate(EvalOptions(model=str(run), questions=str(question_file)))
    scores = json.loads(file.read_text())["questions"]
    loss = evaluate(EvalOptions(model=f"{run}/", data=data))
    assert "questions" not in loss
    both = json.loads(file.read_text())
    assert (both["questions"], both["held_out"]) == (scores, loss["held_out"])
    evaluate(EvalOptions(model=str(run), questions=str(question_file), limit=3))
    again = json.loads(file.read_text())
    assert again["held_out"] == loss["held_out"]
    assert again["questions"]["num_asked"] == 3
    file.write_text(json.dumps({**again, "step": 2}))
    evaluate(EvalOptions(model=str(run), data=data))
    assert "questions" not in json.loads(file.read_text())


def test_an_untrained_model_scores_zero(fresh_run: Path, question_file: Path) -> None:
    """No answer is right by accident, and the majority baseline is above it."""
    result = ask(fresh_run, question_file)
    assert result["all"]["normalized"]["value"] == 0.0
    assert result["all"]["majority"]["value"] == pytest.approx(4 / 6)


def test_answers_do_not_depend_on_the_batch_size(fresh_run: Path, question_file: Path, tmp_path: Path) -> None:
    """One at a time, in odd batches or all at once: the same text for every question."""
    texts = []
    for size in (1, 4, 64):
        ask(fresh_run, question_file, tmp_path / str(size) / "eval.json", batch_size=size)
        texts.append((tmp_path / str(size) / "predictions.jsonl").read_text(encoding="utf-8"))
    assert texts[0] == texts[1] == texts[2]
    assert len({json.loads(line)["predicted"] for line in texts[0].splitlines()}) > 1


def test_run_folders_keep_their_evaluation(learned_run: Path, question_file: Path) -> None:
    """Without an output the result lies in the run folder, with every answer beside it; Chinese stays readable."""
    result = evaluate(EvalOptions(model=str(learned_run), questions=str(question_file)))
    assert json.loads((learned_run / "eval.json").read_text(encoding="utf-8")) == result
    assert result["step"] == 120
    text = (learned_run / "predictions.jsonl").read_text(encoding="utf-8")
    first, *_, last = [json.loads(line) for line in text.splitlines()]
    assert (first["predicted"], first["task"], first["ended"]) == ("1,250 yuan", "fee", "stop")
    assert "可以" in text
    assert last["where"].endswith("qa.jsonl:6")


def test_held_out_loss_is_that_of_training(learned_run: Path) -> None:
    """The loss on the learned rows is small, and perplexity and bits per byte belong to it."""
    data = str(learned_run.parent / "data")
    numbers = evaluate(EvalOptions(model=str(learned_run), data=data))["held_out"]
    assert 0 < numbers["loss"] < 0.1
    assert numbers["perplexity"] == pytest.approx(2.718281828 ** numbers["loss"], rel=1e-6)
    assert numbers["rows"] == 6
    part = evaluate(EvalOptions(model=str(learned_run), data=data, max_rows=2))["held_out"]
    assert part["rows"] == 2


def test_majority_from_a_training_file(learned_run: Path, question_file: Path, tmp_path: Path) -> None:
    """The baseline's answers come from the file that is named, and the result says from which."""
    train = tmp_path / "train.jsonl"
    train.write_text('{"prompt": "x", "completion": "No", "task": "yes_no", "language": "en"}\n', encoding="utf-8")
    result = ask(learned_run, question_file, tmp_path / "eval.json", majority_from=str(train))
    assert result["all"]["majority"]["correct"] == 1
    assert result["majority_from"] == str(train)
    assert ask(learned_run, question_file, tmp_path / "eval.json")["majority_from"] == str(question_file)


def test_a_limit_takes_a_sample_and_says_so(learned_run: Path, question_file: Path, tmp_path: Path) -> None:
    """A sample is stated with its size and seed; a limit that takes all is none."""
    result = ask(learned_run, question_file, tmp_path / "eval.json", limit=2, seed=3)
    assert (result["num_asked"], result["num_in_file"], result["sample_seed"]) == (2, 6, 3)
    assert ask(learned_run, question_file, tmp_path / "eval.json", limit=6)["sample_seed"] is None


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2"])
def test_prompts_too_long_are_wrong_and_counted(make_run: Callable[..., Path], name: str, tmp_path: Path) -> None:
    """A prompt that fills the model's positions is a wrong answer in the result, not a crash; a tight one has room."""
    sizes = {"max_positions": 96, "vocab_size": 300}
    opened = load_model(make_run(1, {"name": name, "num_layers": 1, **sizes}), device="cpu")
    asked = [Asked("", "x" * length, "a", (None, None)) for length in (5, 95, 96, 300)]
    tokens = [len(ids) for ids in opened.tokenizer.encode_batch([str(one.prompt) for one in asked])]
    assert tokens == [5, 95, 96, 300]
    answers = generate_answers(opened, asked, batch_size=4, max_new_tokens=8)
    assert [answer.ended == "too long" for answer in answers] == [False, False, True, True]
    assert answers == [generate_answers(opened, [one], batch_size=1, max_new_tokens=8)[0] for one in asked]


def test_answers_without_end_are_counted(fresh_run: Path, question_file: Path, tmp_path: Path) -> None:
    """An answer that runs into its budget is told from one that ended by itself."""
    result = ask(fresh_run, question_file, tmp_path / "eval.json", max_new_tokens=1)
    lines = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    ended = [json.loads(line)["ended"] for line in lines]
    assert result["answers_without_end"] == ended.count("budget") > 0


def test_end_of_turn_stops_an_answer(learned_chat_run: Path) -> None:
    """The token that ends a turn in the chat template stops, even where EOS is another one."""
    opened = load_model(learned_chat_run, device="cpu")
    ends = opened.tokenizer.special_tokens
    assert opened.end_of_turn == ends["<|im_end|>"]
    core = dataclasses.replace(opened.tokenizer.core, eos="<|endoftext|>")
    opened.__dict__["tokenizer"] = type(opened.tokenizer)(core)
    assert opened.stop_ids == {ends["<|im_end|>"], ends["<|endoftext|>"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nothing to evaluate on"),
        ({"data": "d", "limit": 3}, "limit: has no effect without questions"),
        ({"questions": "q", "max_rows": 3}, "max_rows: has no effect without data"),
        ({"questions": "none.jsonl"}, "no such question file"),
        ({"data": "nowhere"}, "no such data set folder"),
    ],
)
def test_unfit_options_are_refused(learned_run: Path, options: dict[str, Any], words: str) -> None:
    """Nothing is silently ignored: an option without effect and a missing file are errors."""
    with pytest.raises(UserError, match=words):
        evaluate(EvalOptions(model=str(learned_run), **options))


def test_rows_that_are_too_long_are_refused(learned_run: Path, question_file: Path, tmp_path: Path) -> None:
    """Rows beyond the model's positions would be scored outside of what it was made for."""
    long = tmp_path / "long.txt"
    long.write_text("abcdefgh" * 100, encoding="utf-8")
    build(
        DataBuild(inputs=str(long), output=str(tmp_path / "long"), tokenizer=str(learned_run / "tokenizer"),
                  sequence_length=256, num_workers=1),
        progress=False,
    )  # fmt: skip
    with pytest.raises(UserError, match="the rows are longer than the model's positions"):
        evaluate(EvalOptions(model=str(learned_run), data=str(tmp_path / "long")))


def test_command_prints_a_table(learned_run: Path, question_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People get scores with intervals, the baseline and where it comes from, on stdout."""
    from danlu.cli import eval_model

    eval_model.command(str(learned_run), questions=str(question_file), limit=5, device="cpu")
    shown = capsys.readouterr().out
    assert "1.000 [0.566, 1.000]" in shown
    assert "a random sample (seed 0) of the 6 questions" in shown
    assert "the questions themselves" in shown


def test_only_what_follows_the_marker_counts() -> None:
    """With a marker, working before it is free: the last marker counts on both sides; without one, all text counts."""
    asked = [Asked("", "Q", "3 + 4 => 7 yuan", ("sum", "en")), Asked("", "Q", "yes", ("yes_no", "en"))]
    answers = [Answer("4 + 3 => 8 => 7 yuan", "stop"), Answer("1 / 2 => yes", "stop")]
    assert grade(asked, answers, {(None, None): "7 yuan"}, "=>")["all"]["strict"]["correct"] == 2
    assert grade(asked, answers, {(None, None): "7 yuan"})["all"]["strict"]["correct"] == 0
    wrong = [Answer("3 + 4 => 6 yuan", "stop"), Answer("1 / 2 => no", "stop")]
    assert grade(asked, wrong, {(None, None): "7 yuan"}, "=>")["all"]["strict"]["correct"] == 0


def test_an_output_that_cannot_be_written_is_refused_first(question_file: Path, tmp_path: Path) -> None:
    """The place of the result is looked at before the model is even opened."""
    with pytest.raises(UserError, match="is a folder, not a file"):
        ask(tmp_path / "no model", question_file, tmp_path)
    with pytest.raises(UserError, match="is a file, not a folder"):
        ask(tmp_path / "no model", question_file, question_file / "eval.json")
