"""llama-index: chats, texts, vectors, objects, functions, an agent. It needs openai 2."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.clients.asked import ANSWER, SAID, TOO_LONG, Trip, get_time, get_weather
from tests.server.live import MODEL

pytest.importorskip("llama_index.llms.openai_like", reason="llama-index is not installed: make clients installs it")

from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

HI = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="hi")]
TOOLS = [FunctionTool.from_defaults(get_weather), FunctionTool.from_defaults(get_time)]


def model(url: str, **fields: Any) -> OpenAILike:
    base = {"model": MODEL, "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "context_window": 1024}
    return OpenAILike(**{**base, "is_chat_model": True, "temperature": 0, **fields})


def test_a_chat_and_its_stream_say_the_same(url: str) -> None:
    asks = model(url, max_tokens=8)
    *_, last = asks.stream_chat(HI)
    assert last.message.content == asks.chat(HI).message.content != ""
    assert len(model(url, max_tokens=4, logprobs=True, top_logprobs=2).chat(HI).logprobs) == 4


@pytest.mark.anyio
async def test_a_chat_beside_others(url: str) -> None:
    asks = model(url, max_tokens=8)
    pieces = [piece.delta async for piece in await asks.astream_chat(HI)]
    assert "".join(piece or "" for piece in pieces) == (await asks.achat(HI)).message.content


def test_texts(url: str) -> None:
    asks = model(url, max_tokens=8, is_chat_model=False)
    *_, last = asks.stream_complete("the cat")
    assert last.text == asks.complete("the cat").text != ""


def test_vectors(url: str) -> None:
    asks = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="none", max_retries=0)
    assert [len(vector) for vector in asks.get_text_embedding_batch(["a", "b"])] == [64, 64]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"is_function_calling_model": True}, {"should_use_structured_outputs": True}])
def test_an_answer_is_an_object(url: str, fields: dict[str, Any]) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    asks = model(url, max_tokens=300, temperature=1, **fields)
    assert isinstance(asks.structured_predict(Trip, PromptTemplate("hi")), Trip)


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_called_and_their_results_sent_back(hermes: str, stream: bool) -> None:
    asks = model(hermes, is_function_calling_model=True)
    given: Any = {"user_msg": "hi", "allow_parallel_tool_calls": True}
    if stream:
        *_, said = asks.stream_chat_with_tools(TOOLS, **given)
    else:
        said = asks.chat_with_tools(TOOLS, **given)
    calls = asks.get_tool_calls_from_response(said)
    assert [(call.tool_name, call.tool_kwargs) for call in calls] == [
        ("get_weather", {"city": "Paris", "days": 3}),
        ("get_time", {}),
    ]
    assert said.message.content == SAID
    results = [ChatMessage(role="tool", content="rain", additional_kwargs={"tool_call_id": c.tool_id}) for c in calls]
    assert asks.chat([*HI, said.message, *results]).message.content == ANSWER


@pytest.mark.anyio
async def test_an_agent_uses_functions_and_answers(hermes: str) -> None:
    asks = FunctionAgent(tools=TOOLS, llm=model(hermes, is_function_calling_model=True))
    assert str(await asks.run("hi", max_iterations=4)) == ANSWER


def test_what_is_refused_is_said(url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="too long"):
        model(url).chat([ChatMessage(role="user", content=TOO_LONG)])
    # Without functions it sends `tool_choice="required"` all the same, which OpenAI's server refuses, too.
    with pytest.raises(openai.BadRequestError, match="there are no tools"):
        model(url, max_tokens=8).as_structured_llm(Trip).chat(HI)
