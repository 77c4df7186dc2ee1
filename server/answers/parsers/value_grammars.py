"""Values that stand between tags: text as it is where the schema allows a string, else JSON; written and read alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from bigmodel.server.answers.parsers.schema_check import fits_part
from bigmodel.server.engine.sampling.expressions import (
    Expression,
    characters,
    choice,
    free_text,
    json_text,
    literal,
)
from bigmodel.server.engine.sampling.tool_schema import moved

_CONSTANTS = {"True": True, "False": False, "None": None}
_OTHERS = ("number", "boolean", "null", "array", "object")


class Root:
    """A schema to which its parts refer.

    Attributes:
        schema: The schema.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    @cached_property
    def as_definition(self) -> dict[str, Any]:
        """The schema where it is `#/$defs/0`: one object, however many parts take it along."""
        found: dict[str, Any] = moved(self.schema, "#/$defs/0")
        return found


def read_value(text: str, value: Any, part: Any, root: Mapping[str, Any]) -> Any:
    """Return the value that a text between tags stands for.

    Args:
        text: As it was written.
        value: The text as JSON; None if it is none.
        part: The schema of the value.
        root: The schema that `part` is of.
    """
    if value is None and text.strip() in _CONSTANTS:
        value = _CONSTANTS[text.strip()]
    as_json = value is not None or text.strip() in ("null", "None")
    if part is None or part is True or part == {}:
        return value if as_json else text
    if as_json and isinstance(value, str) and fits_part(text, part, root):
        return text  # quotes of a string belong to it
    if as_json and fits_part(value, part, root):
        return value
    if fits_part(text, part, root):
        return text
    if isinstance(value, str):  # a number in quotes
        inner = _json(value)
        if inner is not None and fits_part(inner, part, root):
            return inner
    if any(kinds == "string" for kinds in _kinds(part, root)):
        return text
    return value if as_json else text


def tagged_value(part: Any, root: Root, excluded: tuple[str, ...]) -> Expression:
    """Return what a value between tags may be.

    Args:
        part: The schema of the value.
        root: The schema that `part` is of.
        excluded: Texts that no value may have in it.
    """
    free = free_text(*excluded)
    options = list(_options(part, root, excluded)) or [free]
    return free if free in options else choice(options)


def with_root(part: Any, path: tuple[str, ...], root: Root) -> dict[str, Any]:
    """Return a part of a schema as a schema of its own; `path` says where it is in ``root``."""
    if isinstance(part, dict) and not _refers(part):
        return part
    if part is True or part == {}:
        return {}
    place = "/".join(step.replace("~", "~0").replace("/", "~1") for step in path)
    return {"$defs": {"0": root.as_definition}, "$ref": f"#/$defs/0/{place}"}


def _options(part: Any, root: Root, excluded: tuple[str, ...]) -> Iterator[Expression]:
    for each in _reached(part, root.schema):
        if not isinstance(each, dict):
            yield free_text(*excluded)
        elif (values := _values(each)) is not None:
            for value in values:
                yield literal(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        elif _alternatives(each, root.schema) is None:
            yield from _of_kinds(each, root, excluded)


def _of_kinds(part: dict[str, Any], root: Root, excluded: tuple[str, ...]) -> Iterator[Expression]:
    """What a part without alternatives may be: text, JSON, or any of both where it does not say."""
    kinds = part.get("type", "string")
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind != "string":
            yield json_text(_schema_of({**part, "type": kind}, root))
        elif "type" in part and "pattern" not in part and ("maxLength" in part or "minLength" in part):
            yield characters(part.get("minLength", 0), part.get("maxLength"), excluded[0][0])
        else:
            yield free_text(*excluded)


def _reached(part: Any, root: Mapping[str, Any]) -> Iterator[Any]:
    """A part and those to which its references and alternatives lead, each once: they may lead back, or to the same."""
    pending, seen = [part], set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, dict) and _values(each) is None:
            pending += reversed(_alternatives(each, root) or ())


def _values(part: dict[str, Any]) -> list[Any] | None:
    """The values that a part names."""
    values = [part["const"]] if "const" in part else part.get("enum")
    return values if isinstance(values, list) else None


def _schema_of(part: dict[str, Any], root: Root) -> dict[str, Any]:
    """A part as a schema of its own, with the definitions of the root where it refers to them."""
    if not _refers(part):
        return part
    return {**moved(part, "#/$defs/0"), "$defs": {"0": root.as_definition}}


def _alternatives(part: dict[str, Any], root: Mapping[str, Any]) -> list[Any] | None:
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(part.get(name), list) and part[name]:
            return list(part[name])
    if "$ref" in part:
        found: Any = root
        for step in str(part["$ref"]).removeprefix("#").strip("/").split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return [found]
    return None


def _kinds(part: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """The types that a schema names."""
    for each in _reached(part, root):
        if isinstance(each, dict):
            kinds = each.get("type", ())
            yield from [kinds] if isinstance(kinds, str) else kinds


def _refers(part: Any) -> bool:
    if isinstance(part, dict):
        return "$ref" in part or any(map(_refers, part.values()))
    return isinstance(part, list) and any(map(_refers, part))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
