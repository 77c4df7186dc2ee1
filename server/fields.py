"""What the fields of a body may hold, beyond what their Python types say."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema

MAX_STOP_LENGTH = 256


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: a lone surrogate at character {error.start}") from None
    return text


def _short(text: str) -> str:
    if not 1 <= len(text) <= MAX_STOP_LENGTH:
        raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters, not {len(text)}")
    return text


def _all_encodable(value: Any) -> Any:
    """``value`` as parsed from JSON, when every text in it, names of members included, is valid Unicode."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            _encodable(part)
        elif isinstance(part, dict):
            pending += (*part.keys(), *part.values())
        elif isinstance(part, list):
            pending += part
    return value


Text = Annotated[str, AfterValidator(_encodable)]
FreeObject = Annotated[dict[str, Any], AfterValidator(_all_encodable)]
"""An object whose members are not ours to know: a tool, a schema, arguments of a template."""
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[
    Text,
    AfterValidator(_short),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}),
]
