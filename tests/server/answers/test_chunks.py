"""What the chunks of an answer have in common."""

from __future__ import annotations

import json
from typing import Any

from bigmodel.server.answers.chunks import Chunks
from bigmodel.server.engine import Done

HEAD = {"id": "x-1", "model": 'the "tiny" one'}
DONE = Done(prompt_tokens=3, completion_tokens=2, cached_tokens=1)


def read(event: bytes) -> dict[str, Any]:
    return json.loads(event.decode().removeprefix("data: "))


def test_every_chunk_has_the_head_and_one_choice() -> None:
    chunk = read(Chunks(HEAD, wants_usage=False).of_choice(2, '"text": "a"'))
    assert chunk == {**HEAD, "choices": [{"index": 2, "text": "a"}]}


def test_usage_comes_last_and_is_null_before() -> None:
    chunks = Chunks(HEAD, wants_usage=True)
    assert read(chunks.of_choice(0, '"text": "a"'))["usage"] is None
    last = read(chunks.closing(DONE))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


def test_nothing_closes_an_answer_that_was_not_asked_for_usage() -> None:
    assert Chunks(HEAD, wants_usage=False).closing(DONE) == b""
