"""litellm, with the prefix of OpenAI's servers, of vLLM's, and of Anthropic's."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.server.clients.asked import ANSWER, SAID, THOUGHT, TOO_LONG, NotedTrip
from tests.server.live import MODEL
from tests.server.test_tool_calls import BOTH, TOOLS, calls_of

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its list of prices is not fetched
litellm = pytest.importorskip("litellm", reason="litellm is not installed: make clients installs it")

PREFIXES = ["openai", "hosted_vllm"]
HI: Any = [{"role": "user", "content": "hi"}]


def given(url: str, prefix: str = "openai", **fields: Any) -> dict[str, Any]:
    base = url if prefix == "anthropic" else f"{url}/v1"
    return {"model": f"{prefix}/{MODEL}", "api_base": base, "api_key": "none", "num_retries": 0, **fields}


@pytest.mark.slow  # the first use imports a lot
@pytest.mark.parametrize("prefix", [*PREFIXES, "anthropic"])
def test_a_chat_and_its_stream_say_the_same(url: str, prefix: str) -> None:
    asked = given(url, prefix, messages=HI, max_tokens=8, temperature=0)
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=HI)
    assert built.choices[0].message.content == whole.choices[0].message.content != ""
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert built.usage.completion_tokens == whole.usage.completion_tokens == 8


@pytest.mark.anyio
async def test_chats_at_once(url: str) -> None:
    answers = [await litellm.acompletion(**given(url, messages=HI, max_tokens=4, seed=seed)) for seed in range(4)]
    assert len({answer.choices[0].message.content for answer in answers}) > 1


@pytest.mark.parametrize("prefix", PREFIXES)
def test_texts_and_vectors(url: str, prefix: str) -> None:
    answer = litellm.text_completion(**given(url, prefix, prompt="the cat", max_tokens=5, temperature=0))
    assert answer.usage.completion_tokens == 5
    vectors = litellm.embedding(**given(url, prefix, input=["a", "b"]))
    assert [len(vector["embedding"]) for vector in vectors.data] == [64, 64]


def test_responses(url: str) -> None:
    answer = litellm.responses(**given(url, input="hi", max_output_tokens=16, temperature=0))
    assert answer.usage.output_tokens <= 16


@pytest.mark.slow
@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_answer_fits_its_schema(url: str, prefix: str) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    for seed in range(3):
        asked = given(url, prefix, messages=HI, response_format=NotedTrip, max_tokens=300, seed=seed)
        NotedTrip.model_validate_json(litellm.completion(**asked).choices[0].message.content)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_called_and_their_results_sent_back(hermes: str, prefix: str, stream: bool) -> None:
    asked = given(hermes, prefix, tools=TOOLS, temperature=0)
    answer = litellm.completion(**asked, messages=HI, stream=stream)
    message = (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message
    assert (calls_of(message), message.content, message.reasoning_content) == (BOTH, SAID, THOUGHT)
    results = [
        {"role": "tool", "tool_call_id": c.id, "name": c.function.name, "content": "rain"} for c in message.tool_calls
    ]
    for said in (message, json.loads(message.model_dump_json())):
        last = litellm.completion(**asked, messages=[*HI, said, *results]).choices[0]
        assert (last.message.content, last.finish_reason) == (ANSWER, "stop")


@pytest.mark.parametrize("prefix", [*PREFIXES, "anthropic"])
def test_failures_are_told_apart(url: str, prefix: str) -> None:
    for fields in ({"messages": [{"role": "user", "content": TOO_LONG}]}, {"messages": HI, "max_tokens": 2000}):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**given(url, prefix, **fields))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**given(url, prefix, messages=HI), "model": f"{prefix}/other"})
