"""From TOML and ``section.key=value`` words to a frozen config, remembering where each value came from.

Later sources win: defaults, then the file, then the command line. Every error names the place to mend: the file and
line for a TOML value, the word for a command-line override.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from danlu.base.errors import UserError, nearest

C = TypeVar("C", bound=BaseModel)

Tree = dict[str, Any]


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A config and, for every key that was set, where: ``file:line`` or ``command line``."""

    config: C
    origins: dict[str, str]

    def origin(self, key: str) -> str:
        """Return where ``section.key`` got its value."""
        return self.origins.get(key, "default")


def read_toml(path: Path) -> Tree:
    """Parse a TOML file; errors name the file (and the line, as the parser reports it)."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError("no such config file", where=str(path), hint="start from one of recipes/*.toml") from None
    except IsADirectoryError:
        raise UserError("this is a folder, not a config file", where=str(path)) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text (byte {error.start})", where=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}", where=str(path)) from None


def parse_override(word: str) -> tuple[tuple[str, ...], Any]:
    """Split ``a.b=value``; the value is read as TOML where it is TOML, else as a plain string.

    Raises:
        UserError: the word has no ``=`` or an empty key.
    """
    key, equals, text = word.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise UserError("an override must read section.key=value", where="command line", seen=word)
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return path, text
    return path, parsed["value"] if len(parsed) == 1 else text  # a line break can hide further keys


def _set(tree: Tree, path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise UserError("this key holds a value, not a section", where="command line", seen=".".join(path))
        tree = child
    tree[path[-1]] = value


def _lines(text: str) -> dict[str, int]:
    """Return the line number of each ``section.key`` in simple TOML (one key a line, which is what people write)."""
    section = ""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?([^\]]+)\]\]?", line):
            section = header[1].strip().strip('"')
            lines.setdefault(section, number)
        elif key := re.match(r"\s*([A-Za-z0-9_.\"-]+)\s*=", line):
            name = key[1].strip('"')
            lines[f"{section}.{name}" if section else name] = number
    return lines


def _keys(tree: Tree, prefix: str = "") -> Iterable[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def load(schema: type[C], path: Path | None, overrides: Sequence[str] = ()) -> Loaded[C]:
    """Build ``schema`` from a TOML file and overrides.

    Raises:
        UserError: unreadable file, unknown key (with the nearest legal one), or a value of the wrong kind; all
            problems are listed at once.
    """
    tree: Tree = {}
    origins: dict[str, str] = {}
    if path is not None:
        tree = read_toml(path)
        lines = _lines(path.read_text(encoding="utf-8-sig"))
        origins = {key: f"{path}:{lines[key]}" if key in lines else str(path) for key in _keys(tree)}
        origins |= {key: f"{path}:{number}" for key, number in lines.items()}
    for word in overrides:
        keys, value = parse_override(word)
        _set(tree, keys, value)
        origins[".".join(keys)] = "command line"
    return Loaded(build(schema, tree, origins, source=str(path) if path else "config"), origins)


def build(schema: type[C], tree: Tree, origins: dict[str, str] | None = None, *, source: str = "config") -> C:
    """Validate a plain tree against ``schema``; like `load`, for callers that already hold the values.

    As strict as the JSON Schema says: `true` is no number and "10" neither.
    """
    try:
        return schema.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        problems = [_explain(schema, problem, origins or {}, source) for problem in error.errors()]
    if len(problems) == 1:
        raise problems[0]
    text = "\n".join(str(problem) for problem in problems)
    raise UserError(f"{len(problems)} problems\n{text}", where=source)


def _explain(schema: type[BaseModel], problem: Any, origins: dict[str, str], source: str) -> UserError:
    location = [str(part) for part in problem["loc"]]
    model, depth = schema, 0
    for part in location:
        field = model.model_fields.get(part)
        if field is None:
            break
        depth += 1
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
        else:
            break
    key = ".".join(location[: depth + (problem["type"] == "extra_forbidden")])
    inside = (origin for name, origin in origins.items() if name.startswith(f"{key}."))
    where = f"{origins.get(key) or next(inside, source)}: {key}" if key else source
    if problem["type"] == "extra_forbidden":
        name, legal = location[-1], sorted(model.model_fields)
        close = nearest(name, legal)
        kind = "section" if model is schema and any(_is_section(schema, other) for other in legal) else "key"
        hint = f"did you mean {close!r}?" if close else _elsewhere(schema, name)
        return UserError(f"unknown {kind} {name!r}", where=where, legal=legal, hint=hint)
    if problem["type"] == "missing":
        return UserError("this key must be given", where=f"{source}: {'.'.join(location)}")
    field = model.model_fields.get(location[depth - 1])
    choices = get_args(field.annotation) if field else ()
    return UserError(
        problem["msg"][0].lower() + problem["msg"][1:],
        where=where,
        seen=repr(problem.get("input")),
        legal=choices
        if choices and all(isinstance(choice, str) for choice in choices)
        else _FORMS.get(problem["type"]),
        hint=_example(key, field, problem["type"], inside=len(location) > depth),
    )


_FORMS = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "string_type": "text in quotes", "tuple_type": "a list", "list_type": "a list",
    "model_type": "a section with keys of its own", "dict_type": "a section with keys of its own",
}  # fmt: skip
_EXAMPLES: dict[str, Any] = {
    "int_type": 8, "int_from_float": 8, "float_type": 0.5, "bool_type": True, "string_type": "name",
    "tuple_type": ["first", "second"], "list_type": ["first", "second"],
}  # fmt: skip


def _example(key: str, field: FieldInfo | None, kind: str, *, inside: bool) -> str | None:
    """Return a hint that shows a value of the right form, the default where there is one, or None."""
    if field is None or kind not in _EXAMPLES:
        return None
    value = _EXAMPLES[kind]
    if not (field.is_required() or field.default in (None, ())):
        return f"such as {key} = {json.dumps(field.default)} (the default)"
    return f"such as {key} = {json.dumps([value] if inside else value)}"


def _is_section(schema: type[BaseModel], name: str) -> bool:
    inner = schema.model_fields[name].annotation
    return isinstance(inner, type) and issubclass(inner, BaseModel)


def _elsewhere(schema: type[BaseModel], name: str) -> str | None:
    """Return a hint where another section has a key of (nearly) this name."""
    for section, field in schema.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and (close := nearest(name, inner.model_fields)):
            return f"did you mean {section}.{close}?"
    return None


def to_toml(config: BaseModel) -> str:
    """Return the resolved config as TOML (unset optional keys are left out; TOML has no null)."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True), multiline_strings=False)
