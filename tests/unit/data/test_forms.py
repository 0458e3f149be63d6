"""Records of every form become the right prompt, completion or chat, or a named fault."""

from __future__ import annotations

from typing import Any

import pytest

from danlu.base.errors import UserError
from danlu.config.data_build import DataBuild
from danlu.data.forms import Example, Template, detect_form, make_reader
from danlu.data.streams import BadRow


def config(**options: Any) -> DataBuild:
    """Return a config with the given options."""
    return DataBuild(inputs="x", output="x", tokenizer="x", **options)


def read(record: dict[str, Any], *, template: bool = True, **options: Any) -> Example:
    """Detect the form of one record and read it."""
    settings = config(**options)
    form = settings.form if settings.form != "auto" else detect_form([record], settings)
    return make_reader(settings, form, [record], template).read(record)


USER = {"role": "user", "content": "问\nx"}
ANSWER = {"role": "assistant", "content": "答"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "问", "input": "x", "output": "答"}, [USER, ANSWER]),
        ({"instruction": "问", "input": None, "output": "答"}, [{"role": "user", "content": "问"}, ANSWER]),
        ({"conversations": [{"from": "human", "value": "问\nx"}, {"from": "gpt", "value": "答"}]}, [USER, ANSWER]),
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "问\nx"}]}, ANSWER]}, [USER, ANSWER]),
        (
            {"system": "s", "conversations": [{"from": "user", "value": "问\nx"}, {"from": "gpt", "value": "答"}]},
            [{"role": "system", "content": "s"}, USER, ANSWER],
        ),
        (
            {"instruction": "b", "output": "答", "history": [["a", "1"]]},
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "1"},
             {"role": "user", "content": "b"}, ANSWER],
        ),
    ],
)  # fmt: skip
def test_chat_forms(record: dict[str, Any], expected: list[dict[str, str]]) -> None:
    """Alpaca, ShareGPT and OpenAI messages become the same chat."""
    assert read(record).messages == expected


def test_system_message_is_added_where_there_is_none() -> None:
    """`system` stands in front of chats without one and leaves others alone."""
    system = {"role": "system", "content": "s"}
    assert read({"messages": [USER, ANSWER]}, system="s").messages == [system, USER, ANSWER]
    own = {"role": "system", "content": "own"}
    assert read({"messages": [own, USER, ANSWER]}, system="s").messages == [own, USER, ANSWER]


def test_plain_forms() -> None:
    """Text, alpaca without a template, and prompt/completion by names or templates."""
    assert read({"text": "好"}) == Example(completion="好")
    assert read({"instruction": "i", "output": "o"}, template=False).prompt.endswith("### Response:\n")
    assert read({"question": "q", "answer": 3}) == Example("q", "3")
    made = read(
        {"text": "where?", "category": "card"},
        prompt_template="Query: {text}\nIntent:",
        completion_template=" {category}",
    )
    assert made == Example("Query: where?\nIntent:", " card")
    poem = read({"title": "静夜思", "lines": ["床前", "明月"]}, text_template="{title}\n{lines}")
    assert poem.completion == "静夜思\n床前\n明月"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": ""}, "text is empty"),
        ({"text": None}, "field 'text' is null"),
        ({"text": {"a": 1}}, "field 'text' is not text"),
        ({"prompt": "p", "completion": " "}, "completion is empty"),
        ({"instruction": "i", "output": ""}, "output is empty"),
        ({"messages": []}, "messages is not a list of turns"),
        ({"messages": [USER]}, "chat has no assistant turn"),
        ({"messages": [{"content": "x"}]}, "a message has no role"),
        ({"conversations": [{"from": "nobody", "value": "x"}]}, "a turn's 'from' is unknown"),
    ],
)
def test_br_185_rows_that_do_not_fit(record: dict[str, Any], reason: str) -> None:
    """Empty, null and misshapen rows are faults with a stated reason."""
    with pytest.raises(BadRow) as caught:
        read(record)
    assert caught.value.reason == reason


def test_br_185_missing_field_names_what_is_there() -> None:
    """An empty object or a row with only a prompt lacks a field; the fault lists the row's fields."""
    reader = make_reader(config(), "prompt_completion", [{"prompt": "p", "completion": "c"}], False)
    with pytest.raises(BadRow, match="'completion' is missing"):
        reader.read({"prompt": "p"})
    with pytest.raises(BadRow, match="'prompt' is missing"):
        reader.read({})


def test_form_that_cannot_be_told() -> None:
    """Unknown fields are listed and the hint says how to name them."""
    with pytest.raises(UserError, match=r"title[\s\S]*text_field"):
        detect_form([{"title": "x"}], config())


def test_template_rules() -> None:
    """Double braces are braces; formats, empty braces, broken braces and no field are refused."""
    assert Template("{{x}} {a}", "t").fill({"a": "1"}) == "{x} 1"
    for text in ("{a:>3}", "{}", "{a", "nothing", "{a!r}"):
        with pytest.raises(UserError, match="templ"):
            Template(text, "t")
    with pytest.raises(BadRow, match="missing"):
        Template("{a.__class__}", "t").fill({"a": "1"})


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("text", {"prompt_field": "a"}),
        ("text", {"train_on": "completion"}),
        ("text", {"layout": "chat"}),
        ("messages", {"packing": "chunk"}),
        ("messages", {"overlong": "split"}),
        ("messages", {"text_template": "{a}"}),
        ("messages", {"layout": "plain"}),
        ("alpaca", {"train_on": "flags"}),
        ("prompt_completion", {"system": "s"}),
    ],
)
def test_options_without_effect_are_refused(form: Any, options: dict[str, Any]) -> None:
    """No option is silently ignored."""
    with pytest.raises(UserError, match="has no effect"):
        make_reader(config(**options), form, [{"prompt": "p", "completion": "c"}], True)
