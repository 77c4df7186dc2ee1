"""What a field may hold is checked beyond its Python type."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from bigmodel.server.fields import MAX_STOP_LENGTH, FreeObject, Number, StopString, Text, TokenId


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Text, "ö\U0001f600"),
        (FreeObject, {"a": [{"b": "c"}, 1, None]}),
        (Number, -0.5),
        (TokenId, 0),
        (TokenId, 2**31 - 1),
        (StopString, "x" * MAX_STOP_LENGTH),
    ],
)
def test_what_fits_stays_as_it_is(field: Any, value: Any) -> None:
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
        (StopString, ""),
        (StopString, "x" * (MAX_STOP_LENGTH + 1)),
    ],
)
def test_what_does_not_fit_is_refused(field: Any, value: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(field).validate_python(value)
