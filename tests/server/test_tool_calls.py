"""Tool calls and reasoning as clients see them, with models that write them: whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Annotated, Any

import httpx
import openai
import pydantic
import pytest

from tests.examples import alike
from tests.server.live import MODEL, serving
from tests.server.scripted import scripted_app

MESSAGES: Any = [{"role": "user", "content": "the weather?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["city", "days"],
            "$defs": {"city": {"enum": ["Paris", "Rome"]}},
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]

HERMES = [
    *("<think>", "\nWhich", " city?", "\n</thi", "nk>\n\n", "I look", " it up.\n", "<tool_call>", "\n"),
    *('{"name": "get_weather", ', '"arguments": {"city": "Paris", "days": 3}}', "\n</tool", "_call>"),
    *("\n<tool_call>", '{"name": "get_time", "arguments": {}}', "</tool_call>"),
]
KIMI = [
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.get_time", ":0"),
    *("<|tool_call_argument_begin|>", "{}", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
]
LLAMA = ["<|python_tag|>", '{"name": "get_weather", ', '"parameters": {"city": "Rome", "days": 1}}']


@contextmanager
def client_of(app: Any) -> Iterator[openai.OpenAI]:
    with serving(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def hermes() -> Iterator[openai.OpenAI]:
    with client_of(scripted_app(HERMES, template="<think></think><tool_call>")) as client:
        yield client


@pytest.fixture(scope="module")
def llama() -> Iterator[openai.OpenAI]:
    app = scripted_app(LLAMA, special=["<|python_tag|>"], template="tools <|python_tag|>")
    with client_of(app) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 200, **fields}
    return client.chat.completions.create(**given)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


BOTH = [("get_weather", {"city": "Paris", "days": 3}), ("get_time", {})]


@pytest.mark.slow
def test_calls_and_reasoning_of_a_whole_answer(hermes: openai.OpenAI) -> None:
    choice = ask(hermes, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert calls_of(choice.message) == BOTH
    assert (choice.message.content, choice.message.reasoning_content) == ("I look it up.", "Which city?")
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(call.type == "function" for call in choice.message.tool_calls)


@pytest.mark.slow
@pytest.mark.parametrize("logprobs", [False, True])
def test_calls_and_reasoning_of_a_stream(hermes: openai.OpenAI, logprobs: bool) -> None:
    chunks = list(ask(hermes, tools=TOOLS, stream=True, logprobs=logprobs))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look it up."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Which city?"
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    heads = [call for call in calls if call.id]
    assert [(call.index, call.type, call.function.arguments) for call in heads] == [
        (0, "function", ""),
        (1, "function", ""),
    ]
    assert all(call.type is None and call.function.name is None for call in calls if not call.id)
    texts = ["".join(call.function.arguments for call in calls if call.index == head.index) for head in heads]
    assert [(head.function.name, json.loads(text)) for head, text in zip(heads, texts)] == BOTH
    assert texts == [call.function.arguments for call in ask(hermes, tools=TOOLS).choices[0].message.tool_calls]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    if logprobs:
        assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == len(HERMES)


@pytest.mark.slow
def test_the_clients_own_stream_helper_puts_the_calls_together(hermes: openai.OpenAI) -> None:
    with hermes.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS, temperature=0) as stream:
        message = stream.get_final_completion().choices[0].message
    assert calls_of(message) == BOTH


def test_one_call_without_parallel_calls(hermes: openai.OpenAI) -> None:
    choice = ask(hermes, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert calls_of(choice.message) == BOTH[:1]
    assert choice.message.content == "I look it up."


@pytest.mark.slow
def test_without_tools_a_call_is_text(hermes: openai.OpenAI) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = ask(hermes, **fields).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert choice.message.content.startswith("I look it up.\n<tool_call>")


def test_a_function_that_was_not_given_is_not_called(hermes: openai.OpenAI) -> None:
    message = ask(hermes, tools=[TIME]).choices[0].message
    assert calls_of(message) == BOTH[1:]
    assert '{"name": "get_weather"' in message.content


@pytest.mark.slow
def test_a_strict_function_is_called_with_arguments_that_fit(hermes: openai.OpenAI) -> None:
    class get_weather(pydantic.BaseModel):
        city: str
        days: int

    class Sooner(get_weather):
        days: Annotated[int, pydantic.Field(le=2)]

    for model, called in ((get_weather, True), (Sooner, False)):
        tool = openai.pydantic_function_tool(model, name="get_weather")
        fields: Any = {"model": MODEL, "messages": MESSAGES, "tools": [tool], "temperature": 0}
        message = hermes.chat.completions.parse(**fields).choices[0].message
        assert [call.function.name for call in message.tool_calls or ()] == ["get_weather"] * called
        assert ('"days": 3' in (message.content or "")) != called


def test_an_answer_that_is_cut_says_so(hermes: openai.OpenAI) -> None:
    choice = ask(hermes, tools=TOOLS, max_tokens=10).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == 'I look it up.\n<tool_call>\n{"name": "get_weather", '


@pytest.mark.slow
def test_a_marker_that_is_a_special_token_is_seen_by_the_parser_alone(llama: openai.OpenAI) -> None:
    choice = ask(llama, tools=TOOLS).choices[0]
    assert calls_of(choice.message) == [("get_weather", {"city": "Rome", "days": 1})]
    assert choice.message.content is None
    assert ask(llama).choices[0].message.content == "".join(LLAMA[1:])
    assert ask(llama, tools=[TIME]).choices[0].message.content == "".join(LLAMA[1:])


@pytest.mark.slow
def test_identifiers_of_kimis_calls_have_the_name_and_count_the_conversations_calls() -> None:
    markers = [piece for piece in KIMI if piece.startswith("<|")]
    call = {"id": "functions.get_time:0", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    earlier = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "5"},
    ]
    with client_of(scripted_app(KIMI, special=markers, template="<|tool_calls_section_begin|>")) as client:
        for before, number in (([], 0), (earlier, 1)):
            asked: Any = {"tools": TOOLS, "messages": [*MESSAGES, *before]}
            message = ask(client, **asked).choices[0].message
            assert (calls_of(message), message.content) == ([("get_time", {})], None)
            assert message.tool_calls[0].id == f"functions.get_time:{number}"
            deltas = [chunk.choices[0].delta for chunk in ask(client, **asked, stream=True)]
            ids = [each.id for delta in deltas for each in delta.tool_calls or () if each.id]
            assert ids == [f"functions.get_time:{number}"]


@pytest.mark.slow
def test_parsers_can_be_switched_off() -> None:
    app = scripted_app(HERMES, template="<think></think><tool_call>", tool_parser="none", reasoning_parser="none")
    with client_of(app) as client:
        assert ask(client, tools=TOOLS).choices[0].message.content == "".join(HERMES)


@pytest.mark.slow
def test_a_conversation_with_calls_and_their_results_goes_on(hermes: openai.OpenAI) -> None:
    said = ask(hermes, tools=TOOLS).choices[0].message
    for form in (said, said.model_dump(), said.to_dict()):
        results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in said.tool_calls]
        assert ask(hermes, tools=TOOLS, messages=[*MESSAGES, form, *results]).choices[0].message.content


# --- required and named -------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.slow
@alike(("choice", "stream"), [("required", False), (NAMED, True)], first=1)
def test_a_call_can_be_required(url: str, choice: Any, stream: bool) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        given = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
        more: Any = {**given, "seed": 0, "parallel_tool_calls": False}
        if stream:
            with client.chat.completions.stream(**more) as streaming:
                answer: Any = streaming.get_final_completion()
        else:
            answer = client.chat.completions.create(**more)
        ((name, arguments),) = calls_of(answer.choices[0].message)
        assert answer.choices[0].finish_reason == "tool_calls"
        if choice == NAMED:
            assert name == "get_weather"
        if name == "get_weather":
            assert arguments["city"] in ("Paris", "Rome")
            assert 0 <= arguments["days"] <= 9
        else:
            assert (name, arguments) == ("get_time", {})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools.0.function.parameters.type",
        ),
        ({"tools": [TIME] * 600}, "tools"),
    ],
)
def test_what_cannot_be_is_refused_by_name(url: str, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
    ],
)
def test_the_field_at_fault_is_named(url: str, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, **fields})
    assert (answer.status_code in (400, 422), answer.json()["error"]["param"]) == (True, param), answer.text


@pytest.mark.slow
def test_a_schema_that_cannot_be_held_is_refused(url: str) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
    body = {"model": MODEL, "messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    error = httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], "'not' is not supported" in error["message"]) == ("tools", True)


@pytest.mark.slow
@alike("choice", [NAMED, "required"], first=1)
def test_an_answer_of_calls_alone_has_no_text_that_a_format_could_hold(url: str, choice: Any) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    form = {"type": "json_schema", "json_schema": {"name": "other", "schema": {"type": "integer"}}}
    given = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300, "temperature": 1}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        plain, held = (ask(client, **given, **more, seed=1).choices[0] for more in ({}, {"response_format": form}))
    assert (held.finish_reason, calls_of(held.message)) == ("tool_calls", calls_of(plain.message))


# --- required, with models that reason ----------------------------------------------------------------

SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think></think>\n\n{% endif %}"
LISTED = ['[{"name": "get_weather", ', '"arguments": {"city": "Paris", "days": 3}}', "]"]
THOUGHT = ["<think>", "Which", " city?", "</think>", "\n\n", *LISTED]
ANALYSED = [
    *("<|channel|>", "analysis", "<|message|>", "Which", " city?", "<|end|>", "<|start|>", "assistant"),
    *("<|channel|>commentary to=functions.", "get_weather", "<|message|>{", '"city": "Paris", "days": 3}', "<|call|>"),
]
FAMILIES = {
    "switched": (THOUGHT, [], f"<tool_call> #}}{SWITCH}{{#"),
    "opened": (THOUGHT, [], "<tool_call></think> #}<think>{#"),
    "special": (["[THINK]", "Which", " city?", "[/THINK]", *LISTED], ["[THINK]", "[/THINK]"], "[TOOL_CALLS][/THINK]"),
    "harmony": (ANALYSED, ["<|end|>", "<|start|>", "<|call|>"], "<|channel|><|message|>"),
}


@pytest.fixture(scope="module")
def family() -> Iterator[Callable[[str], openai.OpenAI]]:
    """The client of a family's model, by its name: each has one server."""
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    with ExitStack() as servers:

        @cache
        def client(name: str) -> openai.OpenAI:
            script, special, template = FAMILIES[name]
            end = "<|return|>" if name == "harmony" else None
            app = scripted_app(script, special=special, template=template, end=end)
            return servers.enter_context(client_of(app))

        yield client


@pytest.mark.slow
@alike("name", [*FAMILIES], first=2)
def test_a_model_that_reasons_does_so_before_a_required_call(name: str, family: Callable[[str], openai.OpenAI]) -> None:
    client = family(name)
    for choice in ("required", NAMED):
        asked: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        answer = ask(client, **asked)
        message = answer.choices[0].message
        assert (message.reasoning_content, calls_of(message)) == ("Which city?", BOTH[:1])
        assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
        deltas = [chunk.choices[0].delta for chunk in ask(client, **asked, stream=True) if chunk.choices]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Which city?"
        assert "".join(delta.content or "" for delta in deltas) == ""
        heads = [call.function.name for delta in deltas for call in delta.tool_calls or () if call.id]
        assert heads == ["get_weather"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}]
)
def test_a_required_call_without_reasoning_where_that_is_switched_off(
    how: dict[str, Any], family: Callable[[str], openai.OpenAI]
) -> None:
    asked: Any = {"tool_choice": "required", "parallel_tool_calls": False, **how}
    choice = ask(family("switched"), tools=TOOLS, **asked).choices[0]
    assert (calls_of(choice.message), choice.finish_reason) == (BOTH[:1], "tool_calls")
    assert getattr(choice.message, "reasoning_content", None) is None


@pytest.mark.slow
@alike("name", ["switched", "opened", "special"], first=2)
def test_reasoning_before_a_required_call_is_bounded(name: str, family: Callable[[str], openai.OpenAI]) -> None:
    more: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    choice = ask(family(name), tools=TOOLS, **more, extra_body={"thinking_token_budget": 1}).choices[0]
    assert (calls_of(choice.message), choice.message.reasoning_content) == (BOTH[:1], "Which")
