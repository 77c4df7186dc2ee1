"""Anthropic's JSON for engine events: a message, whole or as server-sent events."""

from __future__ import annotations

import json
from typing import Any

from bigmodel.server.answers.blocks import Block, BlockEvent, BlockReader, Grown, Opened
from bigmodel.server.answers.json_in_parts import json_in_parts
from bigmodel.server.answers.parsers.formats import AnswerFormat
from bigmodel.server.answers.sse import typed_event
from bigmodel.server.engine.scheduling.request import Delta, Done

_STATUS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = _STATUS_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageAnswer:
    """The answer to a request for a message.

    Args:
        answer_id: Its identifier.
        model: Name of the model.
        prompt_tokens: Tokens of the prompt.
        answer_format: Tells calls and reasoning from the text; None where there are none.
        shows_thinking: Whether reasoning is sent, as thinking.
    """

    alive = typed_event("ping", {})

    def __init__(
        self,
        answer_id: str,
        model: str,
        prompt_tokens: int,
        answer_format: AnswerFormat | None,
        *,
        shows_thinking: bool = True,
    ) -> None:
        self._head: dict[str, Any] = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._reader = BlockReader(answer_format, shows_reasoning=shows_thinking)

    def opening(self) -> bytes:
        """The event `message_start`."""
        usage = _usage(Done(self._prompt_tokens, 0, 0))
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return typed_event("message_start", {"message": message})

    def chunk(self, index: int, delta: Delta) -> bytes:
        """The events of a delta."""
        return b"".join(_event(each) for each in self._reader.read(delta))

    def closing(self, done: Done) -> bytes:
        """The events `message_delta` and `message_stop`."""
        ending = typed_event("message_delta", {"delta": self._stop(), "usage": _usage(done)})
        return ending + typed_event("message_stop", {})

    def failed(self, status: int, error: dict[str, Any]) -> bytes:
        """The event `error`."""
        return typed_event("error", error_body(status, error["message"]))

    def add(self, index: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        self._reader.read(delta)

    def whole(self, done: Done) -> bytes:
        """The whole message, as JSON."""
        content = [_whole(block) for block in self._reader.blocks]
        return json_in_parts({**self._head, "content": content, **self._stop(), "usage": _usage(done)}).encode()

    def _stop(self) -> dict[str, Any]:
        reader = self._reader
        if reader.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": reader.stop}
        if reader.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": "tool_use" if reader.calls else "end_turn", "stop_sequence": None}


def _usage(done: Done) -> dict[str, int]:
    """Anthropic counts the tokens of the prompt that come from the cache apart."""
    return {
        "input_tokens": done.prompt_tokens - done.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.cached_tokens,
        "output_tokens": done.completion_tokens,
    }


# --- blocks -------------------------------------------------------------------------------------------


def _event(event: BlockEvent) -> bytes:
    block = event.block
    if isinstance(event, Opened):
        return typed_event("content_block_start", {"index": block.index, "content_block": _empty(block)})
    if isinstance(event, Grown):
        return typed_event("content_block_delta", {"index": block.index, "delta": _delta(block, event.text)})
    signed = b""
    if block.kind == "reasoning":
        delta = {"type": "signature_delta", "signature": ""}
        signed = typed_event("content_block_delta", {"index": block.index, "delta": delta})
    return signed + typed_event("content_block_stop", {"index": block.index})


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    kind = "thinking" if block.kind == "reasoning" else "text"
    return {"type": f"{kind}_delta", kind: text}


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _whole(block: Block) -> dict[str, Any]:
    empty = _empty(block)
    if block.kind == "call":
        return {**empty, "input": json.loads(block.text) if block.complete else {}}
    return {**empty, empty["type"]: block.text}
