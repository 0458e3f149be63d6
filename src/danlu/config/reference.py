"""The key reference of the docs, written from the schemas: ``python -m danlu.config.reference docs``.

A table that people keep by hand is wrong a month later, so no page repeats a key, a default or a limit: they stand in
the schemas, and this module writes them below a marker line in ``config.md`` and ``zh/config.md``. What stands above
the marker belongs to the page's author. A test compares the files with what this would write.

Types and limits are read from the same JSON Schema that `danlu config schema` prints; each key has one row, and the
description is the field's docstring.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.base.errors import UserError
from danlu.config.data_build import DataBuild, TokenizerTrain
from danlu.config.pipeline import Pipeline
from danlu.config.schema import Config, Section
from danlu.config.stages import EvalOptions, ExportOptions, FinanceOptions

MARKER = "<!-- Everything below this line is written by: python -m danlu.config.reference docs -->"
PAGES = ("config.md", "zh/config.md")

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One schema of the reference."""

    title: str
    about: str
    schema: type[Section]


PARTS = (
    Part("Training", "`danlu train CONFIG.toml`, stage kind `train`", Config),
    Part("Data build", "`danlu data build`, stage kind `data`", DataBuild),
    Part("Tokenizer", "`danlu data tokenizer`, stage kind `tokenizer`", TokenizerTrain),
    Part("Evaluation", "Stage kind `eval`; on the command line `danlu eval MODEL --key-with-dashes`", EvalOptions),
    Part("Export", "Stage kind `export`; on the command line `danlu export MODEL FOLDER`", ExportOptions),
    Part("Finance question set", "Stage kind `finance`; on the command line `danlu data finance OUT`", FinanceOptions),
    Part("Pipeline", "`danlu run PIPELINE.toml`", Pipeline),
)
_NAMES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
_LIMITS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))


def describe_type(field: Schema) -> str:
    """Return what a field takes, in words, from its JSON Schema."""
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if "anyOf" in field:
        return ", or ".join(describe_type(one) for one in field["anyOf"] if one.get("type") != "null")
    if field.get("type") == "array":
        return f"list of {describe_type(field.get('items', {}))}"
    if field.get("type") == "object":
        return "table"
    limits = [f"{sign} {field[name]:g}" for name, sign in _LIMITS if name in field]
    return " ".join([_NAMES[field["type"]], ", ".join(limits)]).strip()


def describe_default(name: str, field: Schema, required: list[str]) -> str:
    """Return a field's default as TOML would have it, or in words where it must be given or is unset."""
    if name in required:
        return "must be given"
    default = field.get("default")
    if default is None:
        return "table, empty" if field.get("type") == "object" else "unset"
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def write_table(schema: Schema) -> list[str]:
    """Return the lines of one section's table; fields that are sections themselves are not listed."""
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for name, field in schema["properties"].items():
        if "$ref" in field:
            continue
        inner = field.get("items", {}).get("$ref")
        takes = f"tables, one `[[{name}]]` each" if inner else describe_type(field)
        default = describe_default(name, field, schema.get("required", []))
        cells = (f"`{name}`", takes, default, " ".join(field.get("description", "").split()))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def write_part(part: Part) -> list[str]:
    """Return the lines of one schema: a table, and one more for each of its sections."""
    schema = part.schema.model_json_schema()
    definitions = schema.get("$defs", {})
    lines = [f"## {part.title}", "", f"{part.about}.", ""]
    sections = {}
    for name, field in schema["properties"].items():
        target, brackets = (field, "[{}]") if "$ref" in field else (field.get("items", {}), "[[{}]]")
        if "$ref" in target:
            sections[brackets.format(name)] = definitions[target["$ref"].rpartition("/")[2]]
    if any("$ref" not in field for field in schema["properties"].values()):
        lines += [*write_table(schema), ""]
    for heading, section in sections.items():
        lines += [f"### `{heading}`", "", " ".join(section["description"].split()), ""]
        lines += [*write_table(section), ""]
    return lines


def write_reference() -> str:
    """Return the Markdown that stands below the marker."""
    return "\n".join(line for part in PARTS for line in write_part(part))


def updated(text: str, where: str) -> str:
    """Return a page with its reference brought up to date.

    Raises:
        UserError: the page has no marker line.
    """
    above, found, _ = text.partition(MARKER)
    if not found:
        raise UserError("this page has no marker line", where=where, legal=MARKER)
    return f"{above}{MARKER}\n\n{write_reference()}"


def main(docs: Path) -> None:
    """Bring the reference pages in the folder ``docs`` up to date."""
    for name in PAGES:
        path = docs / name
        path.write_text(updated(path.read_text(encoding="utf-8"), str(path)), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or ["docs"]))
