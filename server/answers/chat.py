"""Chat completions: chunks of a stream, and the whole answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from bigmodel.server.answers.chunks import Chunks
from bigmodel.server.answers.logprobs import chat_logprobs
from bigmodel.server.engine import Delta, Done, TokenLogprob
from bigmodel.server.state import usage
from bigmodel.server.text.codec import TextCodec


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None


class ChatAnswer:
    """Writes the answer to one chat request of ``n`` choices."""

    def __init__(
        self, answer_id: str, created: int, model: str, n: int, codec: TextCodec, *, logprobs: bool, usage: bool
    ) -> None:
        self._head: dict[str, Any] = {"id": answer_id, "object": "chat.completion", "created": created, "model": model}
        self._chunks = Chunks({**self._head, "object": "chat.completion.chunk"}, usage)
        self._codec = codec
        self._wants_logprobs = logprobs
        self._choices = [_Choice() for _ in range(n)]

    # --- a stream ---------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """One chunk per choice that names the role."""
        role = '{"role": "assistant", "content": ""}'
        return b"".join(self._chunk(index, role, "null", "null") for index in range(len(self._choices)))

    def chunk(self, index: int, delta: Delta) -> bytes:
        """The events for a delta; a finish reason comes in a chunk of its own."""
        out = b""
        if delta.text or delta.logprobs:
            logprobs = "null"
            if self._wants_logprobs:
                logprobs = json.dumps(chat_logprobs(delta.logprobs, self._codec))
            out = self._chunk(index, f'{{"content": {json.dumps(delta.text)}}}', logprobs, "null")
        if delta.finish_reason is not None:
            out += self._chunk(index, "{}", "null", f'"{delta.finish_reason}"')
        return out

    def closing(self, done: Done) -> bytes:
        """The usage chunk, if it was asked for."""
        return self._chunks.closing(done)

    def _chunk(self, index: int, delta: str, logprobs: str, reason: str) -> bytes:
        fields = f'"delta": {delta}, "logprobs": {logprobs}, "finish_reason": {reason}'
        return self._chunks.of_choice(index, fields)

    # --- whole ------------------------------------------------------------------------------------

    def add(self, index: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        choice = self._choices[index]
        choice.text.append(delta.text)
        choice.logprobs += delta.logprobs
        choice.reason = delta.finish_reason

    def whole(self, done: Done) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": chat_logprobs(tuple(choice.logprobs), self._codec) if self._wants_logprobs else None,
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return {
            **self._head,
            "choices": choices,
            "usage": usage(done.prompt_tokens, done.completion_tokens, done.cached_tokens),
        }
