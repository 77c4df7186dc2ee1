"""pydantic-ai: agents over both routes of OpenAI's interface."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.clients.asked import ANSWER, SAID, THOUGHT, Trip, get_time, get_weather
from tests.server.live import MODEL

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make clients installs it")

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.anyio
ROUTES = pytest.mark.parametrize("route", [OpenAIChatModel, OpenAIResponsesModel])


def agent(route: Any, url: str, settings: Any = None, **fields: Any) -> Any:
    model = route(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return Agent(model, model_settings={"temperature": 0, **(settings or {})}, retries=0, **fields)


@ROUTES
async def test_a_conversation_goes_on(url: str, route: Any) -> None:
    asks = agent(route, url, {"max_tokens": 16}, system_prompt="Be brief.", instructions="Say it.")
    first = await asks.run("hi")
    again = await asks.run("and?", message_history=first.all_messages())
    assert first.output
    assert again.usage.output_tokens == 16


@ROUTES
async def test_a_stream_says_the_same(url: str, route: Any) -> None:
    asks = agent(route, url, {"max_tokens": 16})
    async with asks.run_stream("hi") as streamed:
        text = "".join([piece async for piece in streamed.stream_text(delta=True)])
    assert text == (await asks.run("hi")).output


@pytest.mark.slow
@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
@pytest.mark.parametrize("strict", [None, True])
@ROUTES
async def test_an_answer_fits_its_type(url: str, route: Any, form: Any, strict: bool | None) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    asks = agent(route, url, {"temperature": 1, "max_tokens": 300}, output_type=form(Trip, strict=strict))
    assert isinstance((await asks.run("hi")).output, Trip)


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_uses_functions_and_answers(hermes: str, route: Any, stream: bool) -> None:
    asks = agent(route, hermes, tools=[get_weather, get_time])
    if stream:
        events = []
        async with asks.run_stream_events("hi") as streamed:
            async for event in streamed:
                events.append(event)
        run = events[-1].result
    else:
        run = await asks.run("hi")
    assert run.output == ANSWER
    parts = [part for message in run.all_messages() for part in message.parts]
    assert [part.tool_name for part in parts if isinstance(part, ToolCallPart)] == ["get_weather", "get_time"]
    assert [part.content for part in parts if isinstance(part, TextPart)] == [SAID, ANSWER]
    (thinking,) = (part for part in parts if isinstance(part, ThinkingPart))
    assert THOUGHT in (thinking.content, *(thinking.provider_details or {}).get("raw_content", ()))
