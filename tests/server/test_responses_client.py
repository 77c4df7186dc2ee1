"""OpenAI's official client gets responses: whole, streamed, with tools, reasoning and schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.server.live import MODEL
from tests.server.scripted import scripted_app
from tests.server.test_tool_calls import HERMES, client_of

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "strict": False,
}
TIME: Any = {"type": "function", "name": "get_time", "parameters": None, "strict": None}
TOOLS = [WEATHER, TIME]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def hermes() -> Iterator[openai.OpenAI]:
    with client_of(scripted_app(HERMES, template="<think></think><tool_call>")) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": "the end?", "temperature": 0, **fields})


def shown(response: Any) -> list[Any]:
    """The output, without identifiers."""
    found: list[Any] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, json.loads(item.arguments)))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


@pytest.mark.slow
def test_a_response(client: openai.OpenAI) -> None:
    answer = ask(client, max_output_tokens=8, instructions="Be brief.", metadata={"a": "b"})
    assert (answer.object, answer.model, answer.status) == ("response", MODEL, "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0)
    assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (8, 0)
    assert answer.usage.total_tokens == answer.usage.input_tokens + 8
    (item,) = answer.output
    assert (item.role, item.status) == ("assistant", "incomplete")
    assert answer.output_text


@pytest.mark.slow
def test_a_text_and_items_are_the_same_input(client: openai.OpenAI) -> None:
    texts = []
    for given in (
        "the end?",
        [{"role": "user", "content": "the end?"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the end?"}]}],
    ):
        texts.append(ask(client, input=given, max_output_tokens=8).output_text)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "the end?"}], "max_tokens": 8, "temperature": 0}
    assert {*texts} == {client.chat.completions.create(**chat).choices[0].message.content}  # type: ignore[call-overload]


@pytest.mark.slow
def test_a_stream_is_the_whole_response(client: openai.OpenAI) -> None:
    whole = ask(client, max_output_tokens=12)
    events = list(ask(client, max_output_tokens=12, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", whole.output_text)
    assert last.response.usage.output_tokens == 12
    assert list(dict.fromkeys(event.type for event in events)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


def test_an_answer_may_be_sent_back(client: openai.OpenAI) -> None:
    said = ask(client, max_output_tokens=4)
    more = {"role": "user", "content": "and?"}
    for form in (said.output, [item.model_dump() for item in said.output]):
        assert ask(client, input=[{"role": "user", "content": "hi"}, *form, more], max_output_tokens=4).output_text


def test_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {"max_output_tokens": 3, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    (part,) = ask(client, **asked).output[0].content
    assert [len(token.top_logprobs) for token in part.logprobs] == [2, 2, 2]
    streamed = [event for event in ask(client, stream=True, **asked) if event.type == "response.output_text.done"]
    assert [token.logprob for token in streamed[0].logprobs] == [token.logprob for token in part.logprobs]


# --- tools and reasoning ------------------------------------------------------------------------------

WHOLE = [
    ("reasoning", "Which city?"),
    ("message", "I look it up."),
    ("get_weather", {"city": "Paris", "days": 3}),
    ("get_time", {}),
]


@pytest.mark.slow
def test_reasoning_text_and_calls_are_items(hermes: openai.OpenAI) -> None:
    answer = ask(hermes, tools=TOOLS, reasoning={"summary": "auto"})
    assert shown(answer) == WHOLE
    assert answer.status == "completed"
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert len({item.call_id for item in answer.output[2:]}) == 2


def test_reasoning_text_and_calls_are_streamed(hermes: openai.OpenAI) -> None:
    events = list(ask(hermes, tools=TOOLS, stream=True))
    assert shown(events[-1].response) == WHOLE
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.name, json.loads(event.arguments)) for event in done] == WHOLE[2:]
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thought == "Which city?"
    ids = {event.item.id for event in events if event.type == "response.output_item.added"}
    assert ids == {item.id for item in events[-1].response.output}
    assert {event.item_id for event in events if hasattr(event, "item_id")} == ids


@pytest.mark.slow
def test_the_clients_stream_helper_follows(hermes: openai.OpenAI) -> None:
    with hermes.responses.stream(model=MODEL, input="the end?", tools=TOOLS, temperature=0) as stream:
        list(stream)
        assert shown(stream.get_final_response()) == WHOLE


@pytest.mark.slow
def test_a_conversation_with_calls_and_results_goes_on(hermes: openai.OpenAI) -> None:
    said = ask(hermes, tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in said.output
        if item.type == "function_call"
    ]
    for form in (said.output, [item.model_dump() for item in said.output]):
        answer = ask(hermes, tools=TOOLS, input=[{"role": "user", "content": "hi"}, *form, *results])
        assert shown(answer) == WHOLE


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call_can_be_required(client: openai.OpenAI, choice: Any) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    answer = ask(client, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=300)
    ((name, arguments),) = shown(answer)
    assert (name, arguments["city"] in ("Paris", "Rome")) == ("get_weather", True)


@pytest.mark.slow
def test_an_answer_is_held_to_a_schema(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")

    class Said(pydantic.BaseModel):
        good: bool

    parsed = client.responses.parse(model=MODEL, input="good?", text_format=Said, temperature=0).output_parsed
    assert isinstance(parsed, Said)


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "a"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TIME, TIME]}, "tools.1.name"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0"),
        ({"input": "x" * 5000}, "input"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"metadata": {str(number): "a" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ],
)
def test_what_cannot_be_is_refused_by_name(url: str, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": "hi", **fields})
    error = answer.json()["error"]
    assert (answer.status_code in (400, 413, 422), error["param"]) == (True, param), error


@pytest.mark.slow
def test_a_response_goes_on_behind_its_end_where_that_is_asked_for(hermes: openai.OpenAI) -> None:
    for ignored in (False, True):
        response = ask(hermes, max_output_tokens=30, extra_body={"ignore_eos": ignored})
        assert (response.usage.output_tokens == 30, response.status == "incomplete") == (ignored, ignored)
