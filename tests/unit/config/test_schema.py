"""The schema as documentation: every field is described, published as JSON Schema, and read by the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

import danlu
from danlu.config.data_build import DataBuild, TokenizerTrain
from danlu.config.pipeline import Pipeline
from danlu.config.rules import SIZE_KEYS
from danlu.config.schema import Config, Section
from danlu.config.stages import EvalOptions, ExportOptions, FinanceOptions

SCHEMAS = [Config, DataBuild, TokenizerTrain, Pipeline, EvalOptions, ExportOptions, FinanceOptions]
SOURCE = Path(danlu.__file__).parent


def fields(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every leaf field of a schema with its full key."""
    for name, field in schema.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from fields(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_field_is_described(schema: type[Section]) -> None:
    """A key without a line of documentation does not exist; the lines are sentences."""
    for key, field in fields(schema):
        assert field.description, key
        assert field.description.strip().endswith((".", "`", '"')), key


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_section_is_frozen_and_refuses_unknown_keys(schema: type[Section]) -> None:
    """The base's promises hold for every schema and everything nested in it."""
    document = schema.model_json_schema()
    for definition in [document, *document.get("$defs", {}).values()]:
        assert definition["additionalProperties"] is False
    assert schema.model_config["frozen"]


def test_the_json_schema_allows_what_the_loader_allows() -> None:
    """Spot checks of the published schema: choices, bounds, and one path in place of a list."""
    sections = Config.model_json_schema()["$defs"]
    schedule, train, data = (
        sections[name]["properties"] for name in ("ScheduleSection", "TrainSection", "DataSection")
    )
    assert schedule["kind"]["enum"] == ["cosine", "linear", "constant", "wsd"]
    assert train["global_batch_size"]["exclusiveMinimum"] == 0
    assert {choice["type"] for choice in data["train"]["anyOf"]} == {"string", "array"}
    assert train["seed"]["description"].startswith("Seed of")


def reads(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (owner, attribute) of every attribute access in a file: `config.train.steps` gives ("train", "steps")."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            owner = node.value
            yield getattr(owner, "attr", None) or getattr(owner, "id", ""), node.attr


def test_no_option_is_without_effect() -> None:
    """Every field of a training config is read, as an attribute of its section, by the training code or a rule."""
    files = [*(SOURCE / "train").glob("*.py"), SOURCE / "config" / "rules.py"]
    seen = {pair for path in files for pair in reads(path)} | {("model", name) for name in SIZE_KEYS}
    also_called = {"eval": "evaluation"}
    keys = [tuple(key.split(".")) for key, _ in fields(Config)]
    unread = [
        (section, name) for section, name in keys if not {(section, name), (also_called.get(section), name)} & seen
    ]
    assert len(keys) > 50
    assert unread == []
