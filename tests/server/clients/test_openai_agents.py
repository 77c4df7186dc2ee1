"""OpenAI's agents over both routes: functions, streams, types of answers, one agent that hands over to another."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.clients.asked import ANSWER, Trip, get_time, get_weather
from tests.server.live import MODEL

pytest.importorskip("agents", reason="openai-agents is not installed: make clients installs it")

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)
pytestmark = pytest.mark.anyio
ROUTES = pytest.mark.parametrize("route", [OpenAIChatCompletionsModel, OpenAIResponsesModel])


def agent(route: Any, url: str, settings: Any = None, **fields: Any) -> Any:
    model = route(MODEL, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    chosen = ModelSettings(**{"temperature": 0, **(settings or {})})
    return Agent(**{"name": "first", "instructions": "Be brief.", "model": model, "model_settings": chosen, **fields})


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_uses_functions_and_answers(hermes: str, route: Any, stream: bool) -> None:
    asks = agent(route, hermes, tools=[function_tool(get_weather), function_tool(get_time)])
    if stream:
        run = Runner.run_streamed(asks, "hi", max_turns=3)
        kinds = [event.name async for event in run.stream_events() if event.type == "run_item_stream_event"]
        assert [kinds.count(kind) for kind in ("tool_called", "tool_output", "message_output_created")] == [2, 2, 2]
    else:
        run = await Runner.run(asks, "hi", max_turns=3)
    assert run.final_output == ANSWER
    again = await Runner.run(asks, [*run.to_input_list(), {"role": "user", "content": "and?"}], max_turns=3)
    assert again.final_output == ANSWER


@pytest.mark.slow
@ROUTES
async def test_an_answer_fits_its_type(url: str, route: Any) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    asks = agent(route, url, {"temperature": 1, "max_tokens": 300}, output_type=Trip)
    assert isinstance((await Runner.run(asks, "hi")).final_output, Trip)


@pytest.mark.slow
@ROUTES
async def test_an_agent_hands_over_to_another(hermes: str, route: Any) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    other = agent(route, hermes, name="other")
    required = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
    run = await Runner.run(agent(route, hermes, required, handoffs=[other]), "hi", max_turns=3)
    assert (run.last_agent.name, run.final_output) == ("other", ANSWER)
