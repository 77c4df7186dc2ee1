"""The official clients read streams that say that they are alive as those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

import bigmodel.server.http.respond
from bigmodel.server import EngineOptions, Settings, create_app
from tests.server.live import MODEL, serving
from tests.server.serve_tiny import SlowOrBroken
from tests.server.tiny import tiny_model, tiny_tokenizer

MESSAGES: Any = [{"role": "user", "content": "Hi."}]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A model that takes a while for each token."""
    monkeypatch.setattr(bigmodel.server.http.respond, "ALIVE_SECONDS", 0.01)
    model = tiny_model(layers=1)
    model.model.embed_tokens = SlowOrBroken(model.model.embed_tokens, 0.06)
    settings = Settings(MODEL, engine=EngineOptions(kv_bytes=16 << 20, max_sequences=2))
    with serving(create_app(model, tiny_tokenizer(), settings=settings)) as url:
        yield url


@pytest.mark.slow
def test_openais_client(silent: str) -> None:
    asked: Any = {"model": MODEL, "temperature": 0}
    with openai.OpenAI(base_url=f"{silent}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(messages=MESSAGES, max_tokens=4, **asked).choices[0].message.content
        chunks = client.chat.completions.create(messages=MESSAGES, max_tokens=4, stream=True, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        parts = client.completions.create(prompt="Hi.", max_tokens=3, stream=True, **asked)
        assert [part.choices[0].finish_reason for part in parts][-1] == "length"
        events = client.responses.create(input="Hi.", max_output_tokens=4, stream=True, **asked)
        assert [each.type for each in events][-1] == "response.incomplete"
    body = {"messages": MESSAGES, "max_tokens": 4, "stream": True, **asked}
    assert "\n\n: waiting\n\n" in httpx.post(f"{silent}/v1/chat/completions", json=body).text


@pytest.mark.slow
def test_anthropics_client(silent: str) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
    greedy: Any = {**asked, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=silent, api_key="none", max_retries=0) as client:
        whole = [block.text for block in client.messages.create(**greedy).content if block.type == "text"]
        with client.messages.stream(**greedy) as stream:
            assert "".join(stream.text_stream) == "".join(whole)
    answer = httpx.post(f"{silent}/v1/messages", json={**asked, "stream": True})
    assert 'event: ping\ndata: {"type": "ping"}\n\n' in answer.text
