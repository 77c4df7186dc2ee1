"""Values that stand between tags: text as it is where the schema allows a string, else JSON; written and read alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
_DEPTH = 16  # of references and alternatives that are followed
_OTHERS = ("number", "boolean", "null", "array", "object")


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
    if any(kinds == "string" for kinds in _kinds(part, root, 0)):
        return text
    return value if as_json else text


def tagged_value(part: Any, root: dict[str, Any], excluded: tuple[str, ...]) -> Expression:
    """Return what a value between tags may be.

    Args:
        part: The schema of the value.
        root: The schema that `part` is of.
        excluded: Texts that no value may have in it.
    """
    options = list(_options(part, root, excluded, 0))
    free = free_text(*excluded)
    return free if free in options else choice(options)


def with_root(part: Any, path: tuple[str, ...], root: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a schema as a schema of its own; `path` says where it is in ``root``."""
    if isinstance(part, dict) and not _refers(part):
        return part
    if part is True or part == {}:
        return {}
    place = "/".join(step.replace("~", "~0").replace("/", "~1") for step in path)
    return {"$defs": {"0": moved(root, "#/$defs/0")}, "$ref": f"#/$defs/0/{place}"}


def _options(part: Any, root: dict[str, Any], excluded: tuple[str, ...], depth: int) -> Iterator[Expression]:
    free = free_text(*excluded)
    if not isinstance(part, dict) or depth > _DEPTH:
        yield free
        return
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list):
        for value in values:
            yield literal(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        return
    alternatives = _alternatives(part, root)
    if alternatives is not None:
        for each in alternatives:
            yield from _options(each, root, excluded, depth + 1)
        return
    kinds = part.get("type")
    if kinds is None:
        yield free
        return
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind != "string":
            yield json_text(_schema_of({**part, "type": kind}, root))
        elif "pattern" not in part and ("maxLength" in part or "minLength" in part):
            yield characters(part.get("minLength", 0), part.get("maxLength"), excluded[0][0])
        else:
            yield free


def _schema_of(part: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A part as a schema of its own, with the definitions of the root where it refers to them."""
    if not _refers(part):
        return part
    return {**moved(part, "#/$defs/0"), "$defs": {"0": moved(root, "#/$defs/0")}}


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


def _kinds(part: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """The types that a schema names."""
    if not isinstance(part, dict) or depth > _DEPTH:
        return
    for each in _alternatives(part, root) or ():
        yield from _kinds(each, root, depth + 1)
    kinds = part.get("type", ())
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
