"""OpenAI's JSON of responses for engine events: an object with items, whole or as server-sent events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from bigmodel.server.answers.blocks import Block, BlockEvent, BlockReader, Grown, Opened
from bigmodel.server.answers.json_in_parts import json_in_parts
from bigmodel.server.answers.logprobs import chat_logprobs
from bigmodel.server.answers.parsers.formats import AnswerFormat
from bigmodel.server.answers.sse import COMMENT, event
from bigmodel.server.engine.scheduling.request import Delta, Done, TokenLogprob
from bigmodel.server.text.codec import TextCodec

_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}
_PARTS = {"content": "output_text", "reasoning": "reasoning_text"}


class ResponseAnswer:
    """The answer to a request for a response.

    Args:
        head: What all of its objects begin with: its identifier, and the fields of the request that it repeats.
        head_json: The same as JSON.
        codec: The tokenizer.
        answer_format: Tells calls and reasoning from the text; None where there are none.
        logprobs: Whether it has log-probabilities.
    """

    alive = COMMENT

    def __init__(
        self,
        head: dict[str, Any],
        head_json: str,
        codec: TextCodec,
        answer_format: AnswerFormat | None,
        *,
        logprobs: bool,
    ) -> None:
        self._head = head
        self._head_json = head_json
        self._codec = codec
        self._wants_logprobs = logprobs
        self._reader = BlockReader(answer_format)
        self._ids: dict[int, str] = {}
        self._number = -1

    # --- streamed ---------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """The events `response.created` and `response.in_progress`."""
        rest: dict[str, Any] = {
            "status": "in_progress",
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
        }
        return self._of_response("response.created", rest) + self._of_response("response.in_progress", rest)

    def chunk(self, index: int, delta: Delta) -> bytes:
        """The events of a delta."""
        return b"".join(part for each in self._reader.read(delta) for part in self._events(each))

    def closing(self, done: Done) -> bytes:
        """The event `response.completed`, or `response.incomplete`."""
        rest = self._end(done)
        return self._of_response(f"response.{rest['status']}", rest)

    def failed(self, status: int, error: dict[str, Any]) -> bytes:
        """The event `response.failed`."""
        why = {"code": "server_error", "message": error["message"]}
        rest = {"status": "failed", "output": self._items(), "usage": None, "error": why, "incomplete_details": None}
        return self._of_response("response.failed", rest)

    def _of_response(self, kind: str, rest: dict[str, Any]) -> bytes:
        self._number += 1
        response = f"{self._head_json[:-1]}, {json.dumps(rest)[1:]}"
        return event(f'{{"type": "{kind}", "sequence_number": {self._number}, "response": {response}}}', kind)

    def _event(self, kind: str, block: Block, **fields: Any) -> bytes:
        self._number += 1
        data = {"type": kind, "sequence_number": self._number, "output_index": block.index, **fields}
        return event(json.dumps(data), kind)

    def _events(self, found: BlockEvent) -> Iterator[bytes]:
        block = found.block
        item_id = self._id(block)
        part = {"item_id": item_id, "content_index": 0}
        if isinstance(found, Opened):
            yield self._event("response.output_item.added", block, item=self._item(block, begun=True))
            if block.kind != "call":
                yield self._event("response.content_part.added", block, **part, part=self._part(block, begun=True))
        elif block.kind == "call":
            kind = "response.function_call_arguments"
            if isinstance(found, Grown):
                yield self._event(f"{kind}.delta", block, item_id=item_id, delta=found.text)
                return
            yield self._event(f"{kind}.done", block, item_id=item_id, name=block.name, arguments=block.text)
            yield self._event("response.output_item.done", block, item=self._item(block))
        else:
            kind = f"response.{_PARTS[block.kind]}"
            more = {"logprobs": self._logprobs(block.logprobs)} if block.kind == "content" else {}
            if isinstance(found, Grown):
                if block.kind == "content":
                    more = {"logprobs": self._logprobs(found.logprobs)}
                yield self._event(f"{kind}.delta", block, **part, delta=found.text, **more)
                return
            yield self._event(f"{kind}.done", block, **part, text=block.text, **more)
            yield self._event("response.content_part.done", block, **part, part=self._part(block))
            yield self._event("response.output_item.done", block, item=self._item(block))

    # --- whole ------------------------------------------------------------------------------------

    def add(self, index: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        self._reader.read(delta)

    def whole(self, done: Done) -> bytes:
        """The whole response, as JSON."""
        return json_in_parts({**self._head, **self._end(done)}).encode()

    def _end(self, done: Done) -> dict[str, Any]:
        cut = self._reader.finish_reason == "length"
        return {
            "status": "incomplete" if cut else "completed",
            "output": self._items(),
            "usage": {
                "input_tokens": done.prompt_tokens,
                "input_tokens_details": {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": done.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
                "total_tokens": done.prompt_tokens + done.completion_tokens,
            },
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        }

    # --- items ------------------------------------------------------------------------------------

    def _items(self) -> list[dict[str, Any]]:
        return [self._item(block) for block in self._reader.blocks]

    def _item(self, block: Block, *, begun: bool = False) -> dict[str, Any]:
        if block.kind == "call":
            cut = not block.complete
        else:
            cut = self._reader.finish_reason == "length" and block is self._reader.blocks[-1]
        status = "in_progress" if begun else "incomplete" if cut else "completed"
        item = {"id": self._id(block), "status": status}
        if block.kind == "call":
            arguments = "" if begun else block.text
            call = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
            return {"type": "function_call", **item, **call}
        content = [] if begun else [self._part(block)]
        if block.kind == "reasoning":
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _part(self, block: Block, *, begun: bool = False) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PARTS[block.kind], "text": "" if begun else block.text}
        if block.kind == "content":
            part["annotations"] = []
            part["logprobs"] = [] if begun else self._logprobs(block.logprobs)
        return part

    def _id(self, block: Block) -> str:
        if block.index not in self._ids:
            self._ids[block.index] = f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}"
        return self._ids[block.index]

    def _logprobs(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
        if not self._wants_logprobs:
            return []
        found: list[dict[str, Any]] = chat_logprobs(tuple(logprobs), self._codec)["content"]
        return found
