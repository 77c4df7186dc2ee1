"""Calls as Gemma's documentation shows them."""

from __future__ import annotations

import pytest

from tests.server.answers.parsers.reading import Answer, form, read

PARIS = ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    "text",
    [
        '```tool_code\nget_weather(city="Paris")\n```',
        "```tool_code\nprint(get_weather(city='Paris'))\n```",
        "```tool_code\nget_weather('Paris')\n```",
        '[get_weather(city="Paris")]',
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        '```json\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n```',
    ],
)
def test_one_call_in_each_form(text: str) -> None:
    assert read(form("gemma"), text) == Answer(calls=[PARIS])


@pytest.mark.parametrize(
    "text",
    [
        '```tool_code\nget_weather(city="```")\n```',
        "```tool_code\nget_weather(city='```')\n```",
        '```json\n[{"name": "get_weather", "arguments": {"city": "```"}}]\n```',
    ],
)
def test_a_fence_within_a_string_is_text(text: str) -> None:
    assert read(form("gemma"), text + " Done.") == Answer(" Done.", calls=[("get_weather", {"city": "```"})])


def test_several_calls() -> None:
    assert read(form("gemma"), '[get_weather(city="Paris"), get_time()]') == Answer(calls=[PARIS, ("get_time", {})])
    lines = '[get_weather(city="Paris")]\n[get_time()]\n'
    assert read(form("gemma"), lines) == Answer(calls=[PARIS, ("get_time", {})])
    assert read(form("gemma"), lines + "[1, 2]") == Answer("\n[1, 2]", calls=[PARIS, ("get_time", {})])
    text = 'I look.\n```tool_code\nget_weather("Paris", days=2)\nget_time(zone="CET")\n```'
    wanted = [("get_weather", {"city": "Paris", "days": 2}), ("get_time", {"zone": "CET"})]
    assert read(form("gemma"), text) == Answer("I look.", calls=wanted)


@pytest.mark.parametrize(
    "text",
    [
        *("It rains.", "[a link](x)", "[1, 2]", '{"a": 1}', "```json\n[1]\n```\nThat is all.", "```tool_code\n"),
        "```tool_code\nimport os\n```",
        "```tool_code\nunknown()\n```",
        "```tool_code\nget_time(1, 2)\n```",
        "```python\nget_time()\n```",
        '[get_weather(city="Par',
    ],
)
def test_other_texts_are_content(text: str) -> None:
    assert read(form("gemma"), text) == Answer(text)
