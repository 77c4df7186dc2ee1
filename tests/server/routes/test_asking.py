"""What both routes that generate decide alike."""

from __future__ import annotations

import pytest

from tests.server.routes.asking import CHAT, COMPLETIONS, post, refusal

pytestmark = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def test_no_tokens_and_another_model_cannot_be_asked_for(url: str, path: str) -> None:
    assert refusal(url, path, max_tokens=0) == (400, "max_tokens")
    assert refusal(url, path, model="other") == (404, "model")


def test_a_stream_is_of_events_and_ends_with_done(url: str, path: str) -> None:
    answer = post(url, path, stream=True, max_tokens=2)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
