"""Large values are written as the whole encoder writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.responses import JSONResponse

from bigmodel.server.answers.json_in_parts import PART, json_in_parts, written

LONG = [{"token": f"é{number}", "top": [number, -0.5, None, True]} for number in range(2 * PART + 1)]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        1.5,
        'a"b\n\u2028',
        {"a": [], "b": {}, "c": {'"': "d"}},
        LONG,
        {"choices": [{"l": LONG}] * 3},
        [LONG],
    ],
)
def test_the_text_is_that_of_the_whole_encoder(value: Any) -> None:
    assert json_in_parts(value).encode() == JSONResponse(value).body
    assert json_in_parts(value, ascii_only=True) == json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"a": [0.0] * PART + [float("nan")]}])
def test_numbers_that_json_has_not_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_in_parts(value)


@pytest.mark.parametrize("number", [0, 1, PART + 1])
def test_values_that_were_written_before_are_parts_of_larger_ones(number: int) -> None:
    values = LONG[:number]
    assert json_in_parts({"a": [written(value) for value in values]}) == json_in_parts({"a": values})
