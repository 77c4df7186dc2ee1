"""What is wrong with a request's body, in one sentence: it is no JSON, or a field of it is at fault."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bigmodel.server.errors import APIError

DISAGREES = "disagrees"
"""The kind of a validation error about a field that does not go with another one; its context names the ``field``."""

_NO_OBJECT = "the body must be a JSON object, sent with 'Content-Type: application/json'"


def from_validation(errors: list[Any]) -> APIError:
    """What pydantic found, as one error about the first field at fault."""
    # Where a field may have one of several shapes there is an error for each: one about the value says more
    # than those about shapes it was not meant to have, and the deepest of those are about the nearest shape.
    first = min(errors, key=lambda error: _is_shape_error(error["type"]))
    first = min(
        (error for error in errors if error["loc"][:2] == first["loc"][:2]),
        key=lambda error: (_is_shape_error(error["type"]), -len(_place(error))),
    )
    kind: str = first["type"]
    place = _place(first)
    if kind == "extra_forbidden" and place[-1:] != [first["loc"][-1]]:
        place.append(first["loc"][-1])  # the client's own name for a field may be anything
    if kind == DISAGREES:
        place.append(first["ctx"]["field"])
    param = ".".join(map(str, place)) or None
    if kind == "json_invalid":
        return _no_json(first["ctx"]["error"])
    if kind == "extra_forbidden":
        return APIError(
            400, f"'{param or ''}' is not supported by this server", param=param, code="unsupported_parameter"
        )
    shapes = [error for error in errors if _is_shape_error(kind) and _place(error) == place]
    why = _or(dict.fromkeys(_why(error) for error in shapes or [first]))
    message = f"'{param}': {why}" if param else why
    if kind == "missing":
        return APIError(422, message, param=param, code="missing_required_parameter")
    if _is_shape_error(kind):
        return APIError(422, message, param=param, code="invalid_type")
    return APIError(400, message, param=param, code="invalid_value")


def _place(error: Any) -> list[Any]:
    """Where in the body the field of an error is: names and indices."""
    return [part for part in error["loc"][1:] if not _is_shape_name(part)]


def _why(error: Any) -> str:
    if error["type"].startswith("model_"):
        return "must be an object" if error["loc"][1:] else _NO_OBJECT
    return str(error["msg"]).removeprefix("Value error, ").replace("Input should be ", "must be ")


def _or(reasons: Iterable[str]) -> str:
    """``must be this`` and ``must be that`` as one sentence."""
    first, *others = reasons
    return " or ".join([first, *(other.removeprefix("must be ") for other in others)])


def _no_json(why: str) -> APIError:
    return APIError(400, f"the body is no valid JSON: {why}", code="invalid_json")


def _is_shape_error(kind: str) -> bool:
    return kind.endswith(("_type", "_parsing")) or kind.startswith(("union_tag", "model_"))


def _is_shape_name(part: Any) -> bool:
    """Whether a part of an error's place names an alternative shape, not a field."""
    return isinstance(part, str) and (not part.isidentifier() or part in ("str", "int", "float", "bool", "list"))


def unreadable(error: RecursionError | ValueError) -> APIError:
    """What reading a body as JSON ran into, where its grammar was not the trouble."""
    if isinstance(error, RecursionError):
        return _no_json("it is nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return _no_json(f"byte {error.start} is not UTF-8")
    return _no_json("a number in it has too many digits")
