"""Responses are the same whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bigmodel.server.answers.responses import ResponseAnswer
from bigmodel.server.engine import Delta, Done
from tests.server.answers.reading import CODEC
from tests.server.answers.test_anthropic import events_of
from tests.server.answers.test_blocks import FORM, TEXT

DONE = Done(prompt_tokens=5, completion_tokens=3, cached_tokens=2)


def answer() -> ResponseAnswer:
    head = {"id": "resp_1", "object": "response"}
    return ResponseAnswer(head, json.dumps(head), CODEC, FORM, logprobs=False)


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("text", ["so", TEXT, "<think>why", TEXT[:-14]])
def test_a_stream_ends_with_the_whole_response(text: str, reason: str) -> None:
    deltas = [Delta(0, letter, (1,)) for letter in text] + [Delta(0, "", finish_reason=reason)]
    streamed, whole = answer(), answer()
    raw = streamed.opening() + b"".join(streamed.chunk(0, delta) for delta in deltas) + streamed.closing(DONE)
    for delta in deltas:
        whole.add(0, delta)
    events = events_of(raw)
    name, last = events[-1]
    status = {"stop": "completed", "length": "incomplete"}[reason]
    assert name == f"response.{status}"
    said = json.loads(whole.whole(DONE))
    assert without_ids(last["response"].pop("output")) == without_ids(said.pop("output"))
    assert last["response"] == said
    assert said["status"] == status
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert without_ids(done) == without_ids([dict(item) for item in answer_items(deltas)])


def answer_items(deltas: list[Delta]) -> list[dict[str, Any]]:
    made = answer()
    for delta in deltas:
        made.add(0, delta)
    items: list[dict[str, Any]] = json.loads(made.whole(DONE))["output"]
    return items


def test_the_last_item_of_an_answer_that_is_cut_is_incomplete() -> None:
    deltas = [Delta(0, "<think>why</think>so"), Delta(0, "", finish_reason="length")]
    assert [item["status"] for item in answer_items(deltas)] == ["completed", "incomplete"]


def test_a_failure_keeps_what_there_is() -> None:
    made = answer()
    made.chunk(0, Delta(0, "so far "))
    ((name, data),) = events_of(made.failed(500, {"message": "it broke"}))
    assert (name, data["response"]["status"]) == ("response.failed", "failed")
    assert data["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert data["response"]["output"][0]["content"][0]["text"] == "so far"
