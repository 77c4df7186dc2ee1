"""Messages are the same whole and streamed, and end for the reason that the engine gave."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bigmodel.server.answers.anthropic import MessageAnswer, error_body
from bigmodel.server.engine import Delta, Done
from tests.server.answers.test_blocks import FORM, TEXT

DONE = Done(prompt_tokens=5, completion_tokens=3, cached_tokens=2)


def events_of(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for event in raw.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


def test_a_stream_puts_the_whole_message_together() -> None:
    deltas = [Delta(0, letter) for letter in TEXT] + [Delta(0, "", finish_reason="stop")]
    streamed, whole = (MessageAnswer("msg_1", "tiny", 5, FORM) for _ in range(2))
    raw = streamed.opening() + b"".join(streamed.chunk(0, delta) for delta in deltas) + streamed.closing(DONE)
    content: list[dict[str, Any]] = []
    for name, data in events_of(raw):
        if name == "content_block_start":
            content.append(data["content_block"])
        elif name == "content_block_delta":
            for key, value in data["delta"].items():
                if key != "type":
                    content[-1][key] = content[-1].get(key, "") + value
    for delta in deltas:
        whole.add(0, delta)
    said = json.loads(whole.whole(DONE))
    for block in content:
        block.pop("id", None)
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    assert content == [{key: value for key, value in block.items() if key != "id"} for block in said["content"]]
    (_, end), _ = events_of(streamed.closing(DONE))
    assert end["usage"] == said["usage"]
    assert end["delta"]["stop_reason"] == said["stop_reason"] == "tool_use"


def test_cached_tokens_are_counted_apart() -> None:
    usage = json.loads(MessageAnswer("msg_1", "tiny", 5, None).whole(DONE))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 2, 3)


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (Delta(0, "a", finish_reason="stop"), ("end_turn", None)),
        (Delta(0, "a", finish_reason="length"), ("max_tokens", None)),
        (Delta(0, "a", finish_reason="stop", stop="b"), ("stop_sequence", "b")),
    ],
)
def test_reasons_to_stop(last: Delta, reason: tuple[str, str | None]) -> None:
    answer = MessageAnswer("msg_1", "tiny", 5, None)
    answer.add(0, last)
    said = json.loads(answer.whole(DONE))
    assert (said["stop_reason"], said["stop_sequence"]) == reason


def test_a_failure_is_an_event_of_its_own() -> None:
    ((name, data),) = events_of(MessageAnswer("msg_1", "tiny", 5, None).failed(504, {"message": "late"}))
    assert (name, data["error"]) == ("error", {"type": "timeout_error", "message": "late"})


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (500, "api_error"), (503, "overloaded_error")],
)
def test_the_type_of_an_error_follows_from_the_status(status: int, kind: str) -> None:
    assert error_body(status, "why") == {"type": "error", "error": {"type": kind, "message": "why"}}
