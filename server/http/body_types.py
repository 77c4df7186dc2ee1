"""What bodies of requests are made of: strict objects, and texts and numbers that JSON can write and UTF-8 too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from bigmodel.server.http.errors import DISAGREES


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: a lone surrogate at character {error.start}") from None
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
"""An object with arbitrary members: a tool, a schema, arguments of a template."""
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def disagrees(field: str, why: str) -> PydanticCustomError:
    """The validation error of a ``field`` that contradicts another one."""
    return PydanticCustomError(DISAGREES, why, {"field": field})


class Body(BaseModel):
    """Strict types, no unknown fields. A field that is null counts as not given, known or not."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Drop fields that are null, and all unknown ones but the first: one is enough to refuse the body."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        found = {name: given[name] for name in known & given.keys() if given[name] is not None}
        unknown = next((name for name in given if name not in known and given[name] is not None), None)
        return found if unknown is None else {**found, unknown: given[unknown]}
