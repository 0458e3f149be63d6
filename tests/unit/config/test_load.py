"""From text to a config: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from danlu.base.errors import UserError
from danlu.config.load import build, load, parse_override, read_toml, to_toml
from danlu.config.schema import Config

FILE = """\
# a comment
[model]
name = "tiny"

[train]
steps = 5
global_batch_size = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def refusal(*words: str, path: Path | None = None) -> str:
    """Return the text with which the words are refused."""
    with pytest.raises(UserError) as caught:
        load(Config, path, words)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_later_sources_win_and_every_value_knows_its_origin(file: Path) -> None:
    """Defaults, then the file (with its line), then the command line."""
    loaded = load(Config, file, ["train.steps=7", "data.train=/some/folder"])
    assert loaded.config.train.steps == 7
    assert loaded.config.train.global_batch_size == 4
    assert loaded.origin("train.steps") == "command line"
    assert loaded.origin("train.global_batch_size") == f"{file}:7"
    assert loaded.origin("model.name") == f"{file}:3"
    assert loaded.origin("train.seed") == "default"


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ("train.steps=5", ("train", "steps"), 5),
        ("optimizer.learning_rate=1e-3", ("optimizer", "learning_rate"), 1e-3),
        ("metrics.progress=false", ("metrics", "progress"), False),
        ('data.train=["a", "b"]', ("data", "train"), ["a", "b"]),
        ("data.train=/a/b c", ("data", "train"), "/a/b c"),
        ("model.name=org/name", ("model", "name"), "org/name"),
        ("model.name=", ("model", "name"), ""),
        ("model.name=a=b", ("model", "name"), "a=b"),
        ('model.name="5"', ("model", "name"), "5"),
        ("model.name=1\ny = 2", ("model", "name"), "1\ny = 2"),
    ],
)
def test_an_override_is_toml_where_it_is_toml_else_text(word: str, path: tuple[str, ...], value: object) -> None:
    """Numbers, booleans and lists are read; anything else is a string as it stands, and nothing of it is dropped."""
    assert parse_override(word) == (path, value)


@pytest.mark.parametrize("word", ["steps", "=5", "train.=5", ".steps=5", "train..steps=5"])
def test_a_malformed_override_is_shown(word: str) -> None:
    """What is no `section.key=value` is refused with the word itself."""
    text = refusal(word)
    assert "section.key=value" in text
    assert word in text


def test_unknown_keys_and_sections_name_the_nearest(file: Path, tmp_path: Path) -> None:
    """A slip is answered with the right name and the place of the slip, whether in the file or on the command line."""
    assert "did you mean 'steps'?" in refusal("train.stpes=5")
    assert refusal("train.stpes=5").startswith("command line: train.stpes: unknown key 'stpes'")
    assert refusal("trian.steps=5").startswith("command line: trian: unknown section 'trian'")
    assert "did you mean 'train'?" in refusal("trian.steps=5")
    assert "did you mean optimizer.learning_rate?" in refusal("learning_rate=1")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(FILE.replace("global_batch_size", "batch_size"))
    assert refusal(path=wrong).startswith(f"{wrong}:7: train.batch_size: unknown key")
    wrong.write_text(FILE.replace("[train]", "[training]"))
    assert refusal(path=wrong).startswith(f"{wrong}:5: training: unknown section")


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("train.steps=x", ["train.steps", "integer", "'x'"]),
        ("train.steps=0", ["train.steps", "greater than 0", "0"]),
        ("train.steps=true", ["train.steps", "integer"]),
        ("train.steps=2.5", ["train.steps", "integer", "2.5"]),
        ("train.steps='10'", ["train.steps", "integer", "'10'"]),
        ("optimizer.learning_rate=inf", ["optimizer.learning_rate", "finite"]),
        ("optimizer.learning_rate=nan", ["optimizer.learning_rate"]),
        ("optimizer.beta1=1.0", ["optimizer.beta1", "less than 1"]),
        ("model.dropout=-0.1", ["model.dropout", "greater than or equal to 0"]),
        ("schedule.kind=cosin", ["schedule.kind", "legal: cosine, linear, constant, wsd"]),
        ("precision.tf32=1", ["precision.tf32", "boolean"]),
        ("data.train=[1]", ["data.train", "string"]),
        ("train=5", ["train", "object"]),
        ("train.steps.x=1", ["train.steps"]),
    ],
)
def test_a_wrong_value_names_its_key_and_what_was_seen(word: str, parts: list[str]) -> None:
    """Wrong kinds and ranges are refused: nothing is silently turned into a number."""
    text = refusal(word)
    assert text.startswith("command line: ")
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("word", "legal", "hint"),
    [
        ("train.steps='10'", "a whole number", "such as train.steps = 8"),
        ("train.micro_batch_size=2.5", "a whole number", "such as train.micro_batch_size = 8 (the default)"),
        ("optimizer.beta1=[1]", "a number", "such as optimizer.beta1 = 0.9 (the default)"),
        ("precision.tf32=1", "true or false", "such as precision.tf32 = true (the default)"),
        ("model.name=3", "text in quotes", 'such as model.name = "tiny" (the default)'),
        ("data.train=3", "a list", 'such as data.train = ["first", "second"]'),
        ("data.train=[1]", "text in quotes", 'such as data.train = ["name"]'),
        ("data.weights=[true]", "a number", "such as data.weights = [0.5]"),
        ("train=5", "a section with keys of its own", None),
        ("model.dropout=-0.1", None, None),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_the_right_one(word: str, legal: str | None, hint: str | None) -> None:
    """The legal form and one example of it, not what the key is for; the example is accepted."""
    text = refusal(word)
    assert text.partition("\n  legal: ")[2].partition("\n")[0] == (legal or "")
    assert text.partition("\n  hint:  ")[2] == (hint or "")
    if hint:
        key, _, value = hint.removeprefix("such as ").removesuffix(" (the default)").partition(" = ")
        load(Config, None, [f"{key}={value}"])


def test_all_problems_are_listed_at_once() -> None:
    """Two slips need one try to be seen, not two."""
    text = refusal("train.seed=-1", "model.nmae=x")
    assert "2 problems" in text
    assert "train.seed" in text
    assert "model.nmae" in text


def test_integers_are_fine_where_floats_are_wanted_and_one_path_where_a_list_is() -> None:
    """The two conveniences that the schema promises."""
    config = load(Config, None, ["optimizer.learning_rate=1", "data.train=one", "data.weights=[1, 2.5]"]).config
    assert config.optimizer.learning_rate == 1.0
    assert config.data.train == ("one",)
    assert config.data.weights == (1.0, 2.5)


@pytest.mark.parametrize(
    ("content", "part"),
    [(None, "no such config file"), (b"[train\n", "not valid TOML"), (b"name = '\xff'", "not UTF-8 text")],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes | None, part: str) -> None:
    """The file is named with what is wrong with it; a folder is no file."""
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)
    for bad, text in ((path, part), (tmp_path, "this is a folder")):
        with pytest.raises(UserError) as caught:
            read_toml(bad)
        assert str(caught.value).startswith(f"{bad}: ")
        assert text in str(caught.value)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    """Files saved by Windows editors load, with right line numbers."""
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + FILE.encode())
    assert load(Config, path).origin("model.name") == f"{path}:3"


def test_configs_are_frozen() -> None:
    """Nobody edits a config after it was checked."""
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.train = config.train  # type: ignore[misc]


def test_the_resolved_config_reads_back_equal(file: Path, tmp_path: Path) -> None:
    """What a run folder saves is what ran: to_toml, then load, is the identity."""
    words = [
        'data.train=["a b", "名"]',
        "data.weights=[0.7, 0.3]",
        "model.tied_embeddings=false",
        "metrics.progress=false",
    ]
    config = load(Config, file, words).config
    saved = tmp_path / "config.toml"
    saved.write_text(to_toml(config), encoding="utf-8")
    assert load(Config, saved).config == config
    assert build(Config, config.model_dump()) == config
