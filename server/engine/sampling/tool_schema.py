"""The schema of an answer that is a list of tool calls, made of the schemas of the functions' arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bigmodel.server.engine.sampling.grammar import DEPTH, GrammarError

_VALUES = frozenset(("enum", "const", "default", "examples"))


def calls_schema(functions: Mapping[str, dict[str, Any]], *, single: bool) -> dict[str, Any]:
    """Return the schema of a list of objects with the `name` of a function and the `arguments` that it takes.

    Args:
        functions: Schemas of the arguments, by name of the function.
        single: Whether the list has one call only.

    Raises:
        GrammarError: A schema is nested too deeply.
    """
    # Messages name a place; but xgrammar makes names of rules of it, which other characters would break.
    places = {name: f"{number}_{re.sub('[^A-Za-z0-9_]', '_', name)}" for number, name in enumerate(functions)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{places[name]}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in functions
    ]
    most = {"maxItems": 1} if single else {}
    return {
        "$defs": {places[name]: moved(schema, f"#/$defs/{places[name]}") for name, schema in functions.items()},
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
        **most,
    }


def moved(part: Any, place: str, depth: int = 0) -> Any:
    """Return a schema whose references hold where it is no longer the whole document, but lies at `place`.

    Raises:
        GrammarError: It is nested too deeply.
    """
    if depth > DEPTH:
        raise GrammarError(f"the schema is nested more than {DEPTH} deep; use $ref and $defs")
    if isinstance(part, list):
        return [moved(inner, place, depth + 1) for inner in part]
    if not isinstance(part, dict):
        return part
    found = {}
    for key, inner in part.items():
        if key == "$ref" and isinstance(inner, str) and inner.startswith("#"):
            found[key] = place + inner[1:]
        else:
            found[key] = inner if key in _VALUES else moved(inner, place, depth + 1)
    return found
