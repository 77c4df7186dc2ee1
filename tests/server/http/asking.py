"""A greedy request to either of the routes that generate, with fields of a test's own."""

from __future__ import annotations

from typing import Any

import httpx

from tests.server.live import MODEL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "the cat"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    """Send it and return the answer; it does not end before it is as long as it may be."""
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, **_ASKED[path], **fields}
    return httpx.post(f"{url}{path}", json=body, timeout=60)


def refusal(url: str, path: str, **fields: Any) -> tuple[int, str]:
    """Status of the answer and the field at fault."""
    answer = post(url, path, **fields)
    return answer.status_code, answer.json()["error"]["param"]
