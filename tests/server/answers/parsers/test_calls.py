"""What counts as a call: a function of the request, with an object as its arguments."""

from __future__ import annotations

import json

import pytest

from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.parts import ToolCall
from tests.server.answers.parsers.reading import SCHEMAS

TOOLS = Tools(SCHEMAS)
PARIS = ToolCall("get_weather", '{"city": "Paris"}')


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}',
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        '{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}',
        '{"type": "function", "function": "get_weather", "parameters": {"city": "Paris"}}',
        '[{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "1"}]',
    ],
)
def test_a_call_in_each_of_its_forms(text: str) -> None:
    assert TOOLS.read(text) == [PARIS]


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "[]", "{", '{"name": "get_weather"}', '{"name": ["get_weather"], "arguments": {}}'),
        '{"name": "unknown", "arguments": {}}',
        '{"name": "get_weather", "arguments": [1]}',
        '{"name": "get_weather", "arguments": "no JSON"}',
        '{"name": "get_weather", "arguments": {"days": NaN}}',
        '{"name": "get_weather", "arguments": {"days": 1e999}}',
        '{"name": "get_weather", "arguments": {"days": ' + "9" * 5000 + "}}",
        '{"name": "get_weather", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        '[{"name": "get_weather", "arguments": {}}, 5]',
    ],
)
def test_anything_else_is_no_call(text: str) -> None:
    assert TOOLS.read(text) is None


def test_line_breaks_in_strings_are_accepted() -> None:
    assert TOOLS.read('{"name": "get_time", "arguments": {"zone": "a\nb"}}') == [
        ToolCall("get_time", '{"zone": "a\\nb"}')
    ]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("get_weather('Paris')", [PARIS]),
        ("[get_weather({'city': 'Paris'})]", [PARIS]),
        ("get_weather.call(city='Paris')", [PARIS]),
        *(
            (text, None)
            for text in ("get_weather('Paris', 1, 2)", "unknown()", "[get_weather(city='Paris'), f()]", "x")
        ),
    ],
)
def test_calls_in_python(text: str, calls: list[ToolCall] | None) -> None:
    assert TOOLS.read_python(text) == calls


def test_arguments_are_text_that_utf_8_can_write() -> None:
    (call,) = TOOLS.read('{"name": "get_time", "arguments": {"zone": "ö\\ud800"}}') or ()
    assert call.arguments.encode()
    assert json.loads(call.arguments) == {"zone": "ö\ud800"}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [("city", "5", "5"), ("days", "5", 5), ("days", "five", "five"), ("other", "null", None), ("other", "[1]", [1])],
)
def test_plain_arguments_have_the_type_of_their_schema(key: str, text: str, value: object) -> None:
    assert TOOLS.argument("get_weather", key, text) == value
