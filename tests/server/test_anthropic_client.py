"""Anthropic's official client works against the server unmodified: messages, streams, tools, thinking, errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.examples import alike
from tests.marks import needs
from tests.server.live import MODEL, serving, tiny_app
from tests.server.scripted import scripted_app
from tests.server.test_tool_calls import HERMES

pytestmark = needs("anthropic")  # importing it takes more than a second

HI: Any = [{"role": "user", "content": "the end?"}]
CITY = {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}}
SCHEMA: Any = {
    "type": "object",
    "properties": CITY,
    "required": ["city"],
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
WEATHER: Any = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
TIME: Any = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, TIME]


@contextmanager
def client_of(url: str, **more: Any) -> Iterator[Any]:
    from anthropic import Anthropic

    with Anthropic(base_url=url, max_retries=0, **{"api_key": "none", **more}) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with client_of(url) as made:
        yield made


@pytest.fixture(scope="module")
def hermes() -> Iterator[Any]:
    app = scripted_app(HERMES, template="<think></think><tool_call> enable_thinking")
    with serving(app) as url, client_of(url) as made:
        yield made


def given(**fields: Any) -> Any:
    """Arguments of the client, which no longer has those of sampling."""
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": HI, "temperature": 0, **fields}
    sampling = {name: asked.pop(name) for name in ("temperature", "top_k") if name in asked}
    return {**asked, "extra_body": sampling}


def ask(client: Any, **fields: Any) -> Any:
    return client.messages.create(**given(**fields))


def streamed(client: Any, **fields: Any) -> Any:
    """What the client's helper makes of a stream: its events, and the message."""
    with client.messages.stream(**given(**fields)) as stream:
        return list(stream), stream.get_final_message()


def shown(message: Any) -> list[Any]:
    """The content, without identifiers."""
    values = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, values[block.type])) for block in message.content]


def test_a_message(client: Any) -> None:
    answer = ask(client, max_tokens=8)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.id.startswith("msg_")
    ((kind, text),) = shown(answer)
    assert (kind, bool(text)) == ("text", True)
    assert answer.usage.output_tokens == 8


def test_the_model_is_listed_and_found(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    found = client.models.retrieve(MODEL)
    assert (found.id, found.display_name, found.type, found.created_at.year > 2020) == (MODEL, MODEL, "model", True)


def test_tokens_are_counted_as_messages_count_them(client: Any) -> None:
    asked: Any = {"system": "Be brief.", "messages": HI, "model": MODEL}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = ask(client, max_tokens=1, **asked).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    assert counted == len("<system>Be brief.\n<user>the end?\n<assistant>") - len("the") + 1


@pytest.mark.slow
def test_a_stream_is_the_whole_message(client: Any) -> None:
    asked: Any = {"max_tokens": 20, "system": [{"type": "text", "text": "Be brief."}], "top_k": 5}
    events, message = streamed(client, **asked)
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 20)
    raw = list(ask(client, stream=True, max_tokens=20))
    text = "".join(event.delta.text for event in raw if event.type == "content_block_delta")
    assert shown(ask(client, max_tokens=20)) == [("text", text)]
    kinds = list(dict.fromkeys(event.type for event in raw))
    blocks = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(client: Any, stream: bool) -> None:
    whole = shown(ask(client, max_tokens=12))[0][1]
    stop = whole[len(whole) // 2 :][:3]
    asked: Any = {"stop_sequences": ["\x00never", stop], "max_tokens": 12}
    answer = streamed(client, **asked)[1] if stream else ask(client, **asked)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert "".join(text for _, text in shown(answer)) == whole[: whole.index(stop)]


def test_an_answer_that_was_begun_goes_on(client: Any) -> None:
    begun = client.messages.count_tokens(model=MODEL, messages=[*HI, {"role": "assistant", "content": "in"}])
    assert begun.input_tokens == len("<user>the end?\n<assistant>in") - len("the") - len("in") + 2


def test_blocks_and_messages_of_a_role_are_joined(client: Any) -> None:
    def count(*messages: Any) -> int:
        return client.messages.count_tokens(model=MODEL, messages=messages).input_tokens

    blocks = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    apart = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert count(blocks) == count(*apart) == count({"role": "user", "content": "a\n\nb"})


# --- tools and thinking -------------------------------------------------------------------------------

WHOLE = [
    ("thinking", "Which city?"),
    ("text", "I look it up."),
    ("tool_use", {"city": "Paris", "days": 3}),
    ("tool_use", {}),
]


@pytest.mark.slow
def test_thinking_text_and_calls_are_blocks(hermes: Any) -> None:
    answer = ask(hermes, tools=TOOLS)
    assert shown(answer) == WHOLE
    assert answer.stop_reason == "tool_use"
    assert [block.name for block in answer.content[2:]] == ["get_weather", "get_time"]
    assert answer.content[2].id != answer.content[3].id


def test_thinking_text_and_calls_are_streamed(hermes: Any) -> None:
    events, message = streamed(hermes, tools=TOOLS)
    assert shown(message) == WHOLE
    assert message.stop_reason == "tool_use"
    assert "".join(event.partial_json for event in events if event.type == "input_json") == (
        '{"city": "Paris", "days": 3}{}'
    )
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2, 3]


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thinking_may_be_hidden(hermes: Any, thinking: Any) -> None:
    assert shown(ask(hermes, tools=TOOLS, thinking=thinking)) == WHOLE[1:]


@pytest.mark.slow
def test_thinking_ends_at_its_budget(hermes: Any) -> None:
    short = ask(hermes, thinking={"type": "enabled", "budget_tokens": 1})
    assert shown(short)[0] == ("thinking", "Which")
    long = ask(hermes, thinking={"type": "enabled", "budget_tokens": 100})
    assert shown(long)[0] == ("thinking", "Which city?")


def test_one_call_where_parallel_ones_are_disabled(hermes: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert shown(ask(hermes, tools=TOOLS, tool_choice=choice)) == WHOLE[:3]


def test_without_tools_a_call_is_text(hermes: Any) -> None:
    answer = ask(hermes, tools=TOOLS, tool_choice={"type": "none"})
    assert [kind for kind, _ in shown(answer)] == ["thinking", "text"]
    assert answer.stop_reason == "end_turn"


@pytest.mark.slow
def test_a_conversation_with_calls_and_results_goes_on(hermes: Any) -> None:
    said = ask(hermes, tools=TOOLS)
    ids = [block.id for block in said.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": ids[1], "content": "no clock", "is_error": True},
        {"type": "text", "text": "And?"},
    ]
    for content in (said.content, [block.model_dump() for block in said.content]):
        more = [*HI, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
        assert ask(hermes, tools=TOOLS, messages=more).content


@alike("choice", [{"type": "tool", "name": "get_weather"}, {"type": "any"}], first=1)
@pytest.mark.slow
def test_a_call_can_be_required(client: Any, choice: Any) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    choice = {**choice, "disable_parallel_tool_use": True}
    answer = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=300)
    (block,) = answer.content
    assert (answer.stop_reason, block.name, block.input["city"] in ("Paris", "Rome")) == (
        "tool_use",
        "get_weather",
        True,
    )


def test_the_usual_effort_asks_for_nothing(client: Any) -> None:
    assert shown(ask(client, max_tokens=4, output_config={"effort": "high"})) == shown(ask(client, max_tokens=4))


def test_an_answer_is_held_to_a_schema(client: Any) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    assert shown(ask(client, output_config={"format": form}))[0][1] in ('"yes"', '"no"')


# --- keys and errors ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_keys_come_in_either_header() -> None:
    from anthropic import AuthenticationError

    with serving(tiny_app(api_keys=("right",))) as url:
        with client_of(url, api_key="right") as client:
            assert ask(client, max_tokens=1).content
        with client_of(url, api_key=None, auth_token="right") as client:
            assert ask(client, max_tokens=1).content
        with client_of(url, api_key="wrong") as client, pytest.raises(AuthenticationError) as refused:
            ask(client, max_tokens=1)
    assert refused.value.body["error"]["type"] == "authentication_error"


def refusal(client: Any, **fields: Any) -> Any:
    from anthropic import APIStatusError

    with pytest.raises(APIStatusError) as refused:
        ask(client, **fields)
    body: Any = refused.value.body
    assert body["type"] == "error"
    return refused.value.status_code, body["error"]["type"], body["error"]["message"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "field"),
    [
        ({"model": "other"}, 404, "not_found_error", "model"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 5000}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "invalid_request_error", "messages"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": [TIME, TIME]}, 400, "invalid_request_error", "tools.1.name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools.0.type"),
        ({"output_config": {"effort": "low"}}, 400, "invalid_request_error", "output_config.effort"),
        ({"container": "x"}, 400, "invalid_request_error", "container"),
        ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "thinking.budget_tokens"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 300}},
            400,
            "invalid_request_error",
            "thinking.budget_tokens",
        ),
    ],
)
def test_refusals_have_anthropics_form_and_name_the_field(
    client: Any, fields: dict[str, Any], status: int, kind: str, field: str
) -> None:
    found = refusal(client, **fields)
    assert found[:2] == (status, kind)
    assert field in found[2]


@pytest.mark.slow
def test_other_failures_under_its_paths_have_its_form_too(url: str) -> None:
    assert httpx.get(f"{url}/v1/messages").json()["error"]["type"] == "invalid_request_error"
    answer = httpx.post(f"{url}/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    answer = httpx.post(f"{url}/v1/messages", content=b"a" * (8 << 20))
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
