"""What is wrong with a body is said in one sentence about one field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bigmodel.server.body_errors import from_validation, unreadable
from bigmodel.server.errors import APIError
from bigmodel.server.schemas import Body, ChatBody, CompletionBody


def error_of(schema: type[Body], value: Any) -> APIError:
    """The error about ``value``, with places as FastAPI gives them."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(value)
    return from_validation([{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()])


def completion(**fields: Any) -> APIError:
    return error_of(CompletionBody, {"model": "m", "prompt": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "'n': must be greater than or equal to 1"),
        ({"n": True}, "'n': must be a valid integer"),
        ({"n": "x", "prompt": [[1], ["a"]]}, "'n': must be a valid integer"),
        ({"prompt": 7}, "'prompt': must be a valid string or a valid list"),
        ({"prompt": [1.5]}, "'prompt.0': must be a valid integer or a valid string or a valid list"),
        ({"prompt": [[1], ["a"]]}, "'prompt.1.0': must be a valid integer"),
        ({"stop": "x" * 257}, "'stop': a stop string has 1 to 256 characters, not 257"),
        ({"response_format": "json"}, "'response_format': must be an object"),
        ({"best_of": 2}, "'best_of': is not supported where it is not n"),
        ({"frob": 1}, "'frob' is not supported by this server"),
    ],
)
def test_a_field_and_why(fields: dict[str, Any], message: str) -> None:
    assert completion(**fields).message == message


def test_the_kind_of_fault_is_a_word_for_programs() -> None:
    faults = [completion(n=0), completion(n="1"), completion(frob=1), error_of(CompletionBody, {"prompt": "x"})]
    assert [(fault.status, fault.code, fault.param) for fault in faults] == [
        (400, "invalid_value", "n"),
        (422, "invalid_type", "n"),
        (400, "unsupported_parameter", "frob"),
        (422, "missing_required_parameter", "model"),
    ]


def test_a_place_deep_inside_is_named() -> None:
    fault = error_of(ChatBody, {"model": "m", "messages": [{"role": "user", "content": 5}]})
    assert fault.message == "'messages.0.content': must be a valid string or a valid list"


def test_what_is_no_object_is_told_how_to_be_sent() -> None:
    fault = error_of(CompletionBody, "text")
    assert (fault.status, fault.param) == (422, None)
    assert "JSON object" in fault.message


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RecursionError(), "nested too deeply"),
        (UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "invalid start byte"), "byte 2 is not UTF-8"),
        (ValueError("Exceeds the limit (4300 digits) for integer string conversion"), "too many digits"),
    ],
)
def test_json_that_cannot_be_read(error: RecursionError | ValueError, why: str) -> None:
    fault = unreadable(error)
    assert (fault.status, fault.code) == (400, "invalid_json")
    assert why in fault.message
