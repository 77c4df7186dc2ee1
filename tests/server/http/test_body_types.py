"""Texts, numbers and free objects are checked beyond their Python types."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from bigmodel.server.http.body_types import FreeObject, Number, Text, TokenId


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Text, "ö\U0001f600"),
        (FreeObject, {"a": [{"b": "c"}, 1, None]}),
        (Number, -0.5),
        (TokenId, 0),
        (TokenId, 2**31 - 1),
    ],
)
def test_valid_values_are_unchanged(field: Any, value: Any) -> None:
    assert TypeAdapter(field).validate_python(value) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Text, "a\ud800"),
        (FreeObject, {"a": [{"b": "\ud800"}]}),
        (FreeObject, {"a": {"\ud800": 1}}),
        (Number, float("nan")),
        (Number, float("inf")),
        (TokenId, -1),
        (TokenId, 2**31),
    ],
)
def test_values_that_do_not_fit_are_refused(field: Any, value: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(field).validate_python(value)
