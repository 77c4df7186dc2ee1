"""JSON of large values, written part by part: a call of the encoder lets no other thread run until it is done."""

from __future__ import annotations

import json
from typing import Any

PART = 256
"""Elements of a list that are written in one call."""


class JSONText(str):
    """A value that has been written: of many small ones the text takes a tenth of their memory."""


_ENCODER, _ASCII = (
    json.JSONEncoder(ensure_ascii=ascii_only, allow_nan=False, separators=(",", ":")) for ascii_only in (False, True)
)


def json_in_parts(value: Any, *, ascii_only: bool = False) -> str:
    """Return a value as JSON, as Starlette's answers write it: without spaces, characters as they are.

    Args:
        value: What `json.dumps` takes, and texts that were written before; names of members are texts.
        ascii_only: Whether to escape other characters.

    Raises:
        ValueError: It has a number that JSON has not.
    """
    return _written(value, _ASCII if ascii_only else _ENCODER)


def written(value: Any) -> JSONText:
    """Return a small value as `json_in_parts` writes it, to be a part of a larger one."""
    return JSONText(_ENCODER.encode(value))


def _written(value: Any, encoder: json.JSONEncoder) -> str:
    if isinstance(value, JSONText):
        return value
    if isinstance(value, dict):
        members = (f"{encoder.encode(name)}:{_written(inner, encoder)}" for name, inner in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list) and len(value) > PART and not isinstance(value[0], JSONText):
        parts = (encoder.encode(value[begin : begin + PART])[1:-1] for begin in range(0, len(value), PART))
        return "[" + ",".join(parts) + "]"
    if isinstance(value, list):
        return "[" + ",".join(_written(inner, encoder) for inner in value) + "]"
    return encoder.encode(value)
