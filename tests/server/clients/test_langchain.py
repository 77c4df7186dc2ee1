"""langchain-openai: chats over both routes, texts, vectors, answers that fit a schema, functions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.clients.asked import ANSWER, SAID, TOO_LONG, NotedTrip, get_time, get_weather
from tests.server.live import MODEL

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make clients installs it")

import langchain_openai as langchain
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

WEATHER, TIME = tool(get_weather), tool(get_time)
ROUTES = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


def given(url: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, **fields}


def chat(url: str, **fields: Any) -> Any:
    return langchain.ChatOpenAI(**given(url, **fields))


@ROUTES
def test_a_chat_and_its_stream_say_the_same(url: str, responses: bool) -> None:
    model = chat(url, temperature=0, max_tokens=16, use_responses_api=responses, stream_usage=True)
    asked = [SystemMessage("Be brief."), HumanMessage("hi")]
    whole = model.invoke(asked)
    first, *others = model.stream(asked)
    for chunk in others:
        first += chunk
    assert first.text == whole.text != ""
    assert first.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] == 16


def test_several_chats_and_choices(url: str) -> None:
    assert len(chat(url, max_tokens=4).batch(["a", "b", "c"])) == 3
    model = chat(url, max_tokens=4, n=2, logprobs=True, top_logprobs=2, seed=3, stop=["x"], extra_body={"top_k": 5})
    ((one, two),) = model.generate([[HumanMessage("hi")]]).generations
    assert len(one.generation_info["logprobs"]["content"]) == 4
    assert two.message.type == "ai"


def test_texts(url: str) -> None:
    model = langchain.OpenAI(**given(url, max_tokens=6, temperature=0))
    whole = model.invoke("the cat")
    assert "".join(model.stream("the cat")) == whole != ""
    assert len(langchain.OpenAI(**given(url, max_tokens=4, n=2, best_of=2)).generate(["a", "b"]).generations) == 2


def test_vectors(url: str) -> None:
    model = langchain.OpenAIEmbeddings(**given(url, check_embedding_ctx_length=False))
    assert [len(vector) for vector in model.embed_documents(["a", "b"])] == [64, 64]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@ROUTES
def test_an_answer_fits_its_schema(url: str, method: str, responses: bool) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    model = chat(url, max_tokens=300, temperature=1, use_responses_api=responses)
    for strict in (None, True):
        assert isinstance(model.with_structured_output(NotedTrip, method=method, strict=strict).invoke("hi"), NotedTrip)


@pytest.mark.slow
def test_an_answer_is_an_object(url: str) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    model = chat(url, max_tokens=100, seed=1).with_structured_output(
        {"title": "any", "type": "object"}, method="json_mode"
    )
    assert isinstance(model.invoke("hi"), dict)


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["v0", "v1"])
def test_functions_are_called_and_their_results_sent_back(
    hermes: str, responses: bool, stream: bool, version: str
) -> None:
    model = chat(hermes, temperature=0, use_responses_api=responses, output_version=version).bind_tools([WEATHER, TIME])
    if stream:
        said, *others = model.stream("hi")
        for chunk in others:
            said += chunk
    else:
        said = model.invoke("hi")
    called = [(call["name"], call["args"]) for call in said.tool_calls]
    assert called == [("get_weather", {"city": "Paris", "days": 3}), ("get_time", {})]
    assert SAID in said.text
    results = [{"get_weather": WEATHER, "get_time": TIME}[call["name"]].invoke(call) for call in said.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    assert model.invoke([HumanMessage("hi"), said, *results]).text == ANSWER


def test_a_strict_function_is_called_alone(hermes: str) -> None:
    model = chat(hermes, temperature=0).bind_tools([WEATHER, TIME], strict=True, parallel_tool_calls=False)
    assert [call["name"] for call in model.invoke("hi").tool_calls] == ["get_weather"]


@ROUTES
def test_a_conversation_that_is_too_long_is_told_apart(url: str, responses: bool) -> None:
    with pytest.raises(ContextOverflowError):
        chat(url, use_responses_api=responses).invoke(TOO_LONG)
    with pytest.raises(ContextOverflowError):
        chat(url, use_responses_api=responses, max_tokens=2000).invoke("hi")
