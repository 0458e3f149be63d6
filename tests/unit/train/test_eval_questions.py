"""Questions: read and tokenized as training data are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danlu.base.errors import UserError
from danlu.data.forms import Example
from danlu.data.masking import encode_chats, encode_plain
from danlu.data.tokenizer import Tokenizer
from danlu.train.questions import Asked, QuestionForm, encode_prompts, read_asked, sample_asked


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[Asked]]:
    """Writes text to a file and reads it as questions."""

    def run(text: str, name: str = "qa.jsonl", training: dict[str, Any] | None = None, **form: Any) -> list[Asked]:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return read_asked(path, QuestionForm(**form), training or {}, has_chat_template=True)

    return run


def test_prompts_have_the_ids_of_training(qa_tokenizer: Path) -> None:
    """What the model is asked is, id by id, what stood before the first target in training; plain and as a chat."""
    tokenizer = Tokenizer.load(qa_tokenizer)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "蓝卡的年费是多少？"}]
    asked = [
        Asked("", "Q: What is the fee?\nA:", " 80 yuan", (None, None)),
        Asked("", chat, "1250元", (None, None)),
    ]
    plain = encode_plain([Example("Q: What is the fee?\nA:", " 80 yuan")], tokenizer, train_on="completion")
    whole = Example(messages=[*chat, {"role": "assistant", "content": "1250元"}], flags=(False, False, True))
    chats, faults = encode_chats([whole], tokenizer, train_on="last")
    assert faults == [None]
    expected = [samples.ids[0][: samples.masks[0][0]] for samples in (plain, chats)]
    assert encode_prompts(asked, tokenizer) == expected


def test_every_form_gives_prompt_and_answer(read: Callable[..., list[Asked]]) -> None:
    """Prompt/completion, question/answer, alpaca and messages are told apart by their fields; labels are kept."""
    pair = read('{"prompt": "2+2=", "completion": "4", "task": "sum", "language": "en"}\n')[0]
    assert (pair.prompt, pair.answer, pair.stratum) == ("2+2=", "4", ("sum", "en"))
    assert read('{"question": "2+2=", "answer": 4}\n')[0].answer == "4"
    alpaca = read('{"instruction": "Add", "input": "2 2", "output": "4"}\n')[0]
    assert alpaca.prompt == [{"role": "user", "content": "Add\n2 2"}]
    turns = (
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},'
    )
    chat = read('{"messages": ' + turns + ' {"role": "assistant", "content": "d"}]}\n')[0]
    assert [message["content"] for message in chat.prompt if isinstance(message, dict)] == ["a", "b", "c"]
    assert chat.answer == "d"


def test_csv_with_templates(read: Callable[..., list[Asked]]) -> None:
    """A csv file is read with the data build's templates, quotes and line breaks included."""
    text = 'text,category\n"Where is\nmy card?",card_arrival\n'
    form = {"prompt_template": "Query: {text}\nIntent:", "completion_template": " {category}"}
    asked = read(text, "test.csv", **form)
    assert [(one.prompt, one.answer) for one in asked] == [("Query: Where is\nmy card?\nIntent:", " card_arrival")]


def test_training_decides_what_options_leave_open(read: Callable[..., list[Asked]]) -> None:
    """Templates, layout and system message of the training data are used, unless options say otherwise."""
    training = {
        "form": "prompt_completion", "prompt_template": "Q {text}", "completion_template": "{category}",
        "layout": "chat", "system": "Be brief.",
    }  # fmt: skip
    text = "text,category\na,b\n"
    chat = read(text, "test.csv", training)[0].prompt
    assert chat == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q a"}]
    assert read(text, "test.csv", training, layout="plain")[0].prompt == "Q a"
    own = read(text, "test.csv", training, prompt_template="{text}?", completion_template="{category}")[0].prompt
    assert isinstance(own, list)
    assert own[-1]["content"] == "a?"
    other_fields = read('{"question": "a", "answer": "b"}\n', training=training)[0].prompt
    assert isinstance(other_fields, list)
    assert other_fields[-1]["content"] == "a"


def test_alpaca_trained_as_plain_text_is_asked_as_plain_text(read: Callable[..., list[Asked]]) -> None:
    """A tokenizer with a chat template does not turn questions into chats that training did not have."""
    row = '{"instruction": "Add", "output": "4"}\n'
    assert isinstance(read(row)[0].prompt, list)
    assert isinstance(read(row, training={"form": "alpaca", "layout": "plain"})[0].prompt, str)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no questions"),
        ('{"text": "a document"}\n', "no answer field"),
        ('{"foo": "a", "bar": "b"}\n', "no answer field"),
        ('{"prompt": "a"\n', "malformed json"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', "qa.jsonl:2: field 'completion' is missing"),
        ('{"messages": [{"role": "assistant", "content": "d"}]}\n', "the assistant speaks first"),
    ],
)
def test_unfit_files_are_refused_by_name_and_line(read: Callable[..., list[Asked]], text: str, words: str) -> None:
    """The error names the file (and the line) and says what is missing."""
    with pytest.raises(UserError, match=words) as caught:
        read(text)
    assert "qa.jsonl" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A path that is no file is the user's error, not an empty evaluation."""
    with pytest.raises(UserError, match="no such question file"):
        read_asked(tmp_path / "none.jsonl", QuestionForm(), {}, has_chat_template=False)


def test_a_sample_is_random_seeded_and_in_order() -> None:
    """The sample depends on the seed alone, has no row twice, and is not simply the head of the file."""
    asked = [Asked(str(number), "q", "a", (None, None)) for number in range(100)]
    sample = [int(one.where) for one in sample_asked(asked, 10, seed=1)]
    assert sample == [int(one.where) for one in sample_asked(asked, 10, seed=1)] == sorted(set(sample))
    assert sample != [int(one.where) for one in sample_asked(asked, 10, seed=2)]
    assert sample[-1] > 20
    assert sample_asked(asked, 100, seed=1) == sample_asked(asked, None, seed=0) == asked


def test_an_empty_prompt_is_refused(qa_tokenizer: Path) -> None:
    """Nothing can be asked without a single token; the row is named."""
    with pytest.raises(UserError, match="qa:3: empty prompt"):
        encode_prompts([Asked("qa:3", "", "a", (None, None))], Tokenizer.load(qa_tokenizer))
