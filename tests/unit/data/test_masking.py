"""Exactly the assistant's words and the end-of-turn tokens are targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from danlu.config.data_build import DataBuild
from danlu.data.forms import Example, make_reader
from danlu.data.masking import encode_chats, encode_plain
from danlu.data.streams import BadRow
from danlu.data.tokenizer import CHATML, Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "手续费是多少？"},
    {"role": "assistant", "content": "手续费是 5 元。"},
    {"role": "user", "content": "And a transfer?"},
    {"role": "assistant", "content": "\nOne day."},
    {"role": "user", "content": "谢谢"},
    {"role": "assistant", "content": "不客气"},
]
NO_PROMPT = CHATML.replace("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "")
DROPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def example(messages: list[dict[str, Any]]) -> Example:
    """Return the example of a `messages` record."""
    reader = make_reader(DataBuild(inputs="x", output="x", tokenizer="x"), "messages", [], True)
    return reader.read({"messages": messages})


def expand(runs: list[int]) -> list[bool]:
    """Return run lengths as one flag per token."""
    return [bool(number % 2) for number, run in enumerate(runs) for _ in range(run)]


def targets(messages: list[dict[str, Any]], tokenizer: Tokenizer, train_on: str = "completion") -> list[str]:
    """Return the decoded runs of targets."""
    samples, faults = encode_chats([example(messages)], tokenizer, train_on=train_on)
    if faults[0] is not None:
        raise faults[0]
    runs: list[list[int]] = []
    previous = False
    for number, wanted in zip(samples.ids[0], expand(samples.masks[0]), strict=True):
        if wanted and not previous:
            runs.append([])
        if wanted:
            runs[-1].append(number)
        previous = wanted
    return [tokenizer.decode(run) for run in runs]


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """Return the tokenizer with another chat template."""
    return Tokenizer(replace(tokenizer.core, chat_template=template))


@pytest.mark.parametrize("template", [CHATML, NO_PROMPT], ids=["chatml", "no generation prompt"])
def test_br_151_mask_is_derived_from_prefixes(tokenizer: Tokenizer, template: str) -> None:
    """Without marks in the template: exactly content and <|im_end|> of each assistant turn."""
    chat = [*CHAT[:4], {"role": "assistant", "content": "One day."}]
    expected = ["手续费是 5 元。<|im_end|>", "One day.<|im_end|>"]
    assert targets(chat, with_template(tokenizer, template)) == expected
    assert targets(CHAT[:5], tokenizer) == [expected[0], "\nOne day.<|im_end|>"]


def test_br_151_ids_are_those_of_transformers(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    """The ids of a chat equal `apply_chat_template` of transformers."""
    reference = AutoTokenizer.from_pretrained(tokenizer_folder)
    samples, _ = encode_chats([example(CHAT)], tokenizer, train_on="completion")
    assert samples.ids[0] == reference.apply_chat_template(CHAT, tokenize=True, return_dict=False)


def test_br_151_rewritten_turns(tokenizer: Tokenizer) -> None:
    """A template that drops earlier thoughts is followed through EOS; one that rewrites earlier text is refused."""
    assert targets(CHAT[:5], with_template(tokenizer, DROPS_THOUGHTS))[0] == "手续费是 5 元。<|im_end|>"
    counts = "{% for m in messages %}{{ messages | length }} {{ m['content'] }}<|im_end|>{% endfor %}"
    with pytest.raises(BadRow, match="cannot be told apart"):
        targets(CHAT[:5], with_template(tokenizer, counts))


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("completion", ["手续费是 5 元。<|im_end|>", "One day.<|im_end|>", "不客气<|im_end|>"]),
        ("last", ["不客气<|im_end|>"]),
        ("flags", ["手续费是 5 元。<|im_end|>", "不客气<|im_end|>"]),
    ],
)
def test_br_153_policies(tokenizer: Tokenizer, train_on: str, expected: list[str]) -> None:
    """All assistant turns, the last, or the flagged ones; target counts equal those of the texts by hand."""
    chat = [dict(message) for message in CHAT]
    chat[4] |= {"content": "One day.", "train": False}
    found = targets(chat, tokenizer, train_on)
    assert found == expected
    samples, _ = encode_chats([example(chat)], tokenizer, train_on=train_on)
    assert sum(expand(samples.masks[0])) == sum(len(tokenizer.encode(text)) for text in expected)


def test_br_153_all_trains_on_every_token(tokenizer: Tokenizer) -> None:
    """Policy `all` makes every token a target."""
    samples, _ = encode_chats([example(CHAT)], tokenizer, train_on="all")
    assert all(expand(samples.masks[0]))


def test_weight_flags_and_their_faults(tokenizer: Tokenizer) -> None:
    """`weight` 0/1 is a flag too; other weights and flagged user turns are refused."""
    chat = [dict(message) for message in CHAT[:3]]
    chat[2]["weight"] = 0
    assert targets(chat, tokenizer, "flags") == []
    chat[2]["weight"] = 0.5
    with pytest.raises(BadRow, match="not 0 or 1"):
        targets(chat, tokenizer, "flags")
    with pytest.raises(BadRow, match="only assistant"):
        targets([{**CHAT[1], "train": True}, CHAT[2]], tokenizer, "flags")


def test_br_155_eos_exactly_once(tokenizer: Tokenizer) -> None:
    """Text and prompt/answer samples end in one EOS, also where the text has it already."""
    eos = tokenizer.eos_id
    examples = [Example(completion="你好"), Example("Q: ", "A"), Example("Q: ", "A<|im_end|>")]
    samples = encode_plain(examples, tokenizer, train_on="completion")
    assert [ids[-1] for ids in samples.ids] == [eos] * 3
    assert [ids.count(eos) for ids in samples.ids] == [1, 1, 1]
    assert [expand(mask)[-1] for mask in samples.masks] == [True] * 3
    assert samples.ids[1] == samples.ids[2]
    prompt = len(tokenizer.encode("Q: "))
    assert samples.masks[1] == [prompt, len(samples.ids[1]) - prompt]


def test_br_155_template_without_end_token_gets_eos(tokenizer: Tokenizer) -> None:
    """A chat template that ends in plain text gets EOS as its last target."""
    plain = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}" \
            "{% if add_generation_prompt %}assistant: {% endif %}"  # fmt: skip
    assert targets(CHAT[1:3], with_template(tokenizer, plain)) == ["手续费是 5 元。\n<|im_end|>"]


def test_template_that_refuses_a_chat_faults_that_chat_only(tokenizer: Tokenizer) -> None:
    """`raise_exception` in a template makes its chat a bad row; the others are encoded."""
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
    own = with_template(tokenizer, strict)
    samples, faults = encode_chats([example(CHAT[1:3]), example(CHAT[:3])], own, train_on="completion")
    assert len(samples.ids) == 1
    assert faults[0] is None
    assert isinstance(faults[1], BadRow)
    assert "user first" in faults[1].detail


def test_the_first_word_behind_a_space_is_trained_on(tokenizer: Tokenizer) -> None:
    """Where a template sets a space before the answer, the token that holds both is a target."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "How long?"}, {"role": "assistant", "content": "the day"}]
    spaced = with_template(tokenizer, template)
    assert len(spaced.encode_offsets([" the"])[0][0]) < len(spaced.encode_offsets(["the"])[0][0]) + 1, "one token"
    assert [text.strip() for text in targets(chat, spaced)] == ["the day<|im_end|>"]


def test_an_added_end_token_is_a_target_only_behind_a_trained_turn(tokenizer: Tokenizer) -> None:
    """A template without an end token gets EOS; behind words that are not trained on it is no target either."""
    bare = with_template(tokenizer, "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    chat = [{"role": "user", "content": "How long?"}, {"role": "assistant", "content": "One day."}]
    assert targets(chat, bare)[-1].endswith("<|im_end|>")
    assert targets([chat[0], {**chat[1], "weight": 0}], bare, "flags") == []


def test_a_row_that_trips_the_template_is_a_bad_row(tokenizer: Tokenizer) -> None:
    """Values of a wrong type are a fault of the row, not of the program."""
    adds = with_template(tokenizer, "{% for m in messages %}{{ m['content'] + m['tool_calls'] }}{% endfor %}")
    _, faults = encode_chats([example(CHAT)], adds, train_on="all")
    assert isinstance(faults[0], BadRow)
    with pytest.raises(BadRow, match="no role"):
        example([{"role": None, "content": "x"}])
