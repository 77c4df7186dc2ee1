"""Text completions: chunks of a stream, and the whole answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from bigmodel.server.answers.chunks import Chunks
from bigmodel.server.answers.logprobs import TextOffsets, completion_logprobs
from bigmodel.server.engine import Delta, Done, TokenLogprob
from bigmodel.server.state import usage
from bigmodel.server.text.codec import TextCodec


@dataclass
class _Choice:
    prompt: list[int]
    offsets: TextOffsets
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    reason: str | None = None
    echoed: bool = False


class CompletionAnswer:
    """Writes the answer to a completion of ``prompts``, ``n`` choices each; choice i of prompt p is p * n + i."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        prompts: list[list[int]],
        n: int,
        codec: TextCodec,
        *,
        echo: bool,
        logprobs: bool,
        usage: bool,
    ) -> None:
        self._head: dict[str, Any] = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._chunks = Chunks(self._head, usage)
        self._codec = codec
        self._echo = echo
        self._wants_logprobs = logprobs
        self._choices = [
            _Choice(prompt, TextOffsets(codec, () if echo else prompt)) for prompt in prompts for _ in range(n)
        ]

    # --- a stream ---------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """Nothing: a completion has no role to name."""
        return b""

    def chunk(self, index: int, delta: Delta) -> bytes:
        """The events for a delta."""
        choice = self._choices[index]
        text, tokens, entries = self._with_echo(choice, delta)
        logprobs = "null"
        if self._wants_logprobs:
            logprobs = json.dumps(completion_logprobs(entries, tokens, self._codec, choice.offsets))
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        fields = f'"text": {json.dumps(text)}, "logprobs": {logprobs}, "finish_reason": {reason}'
        return self._chunks.of_choice(index, fields)

    def closing(self, done: Done) -> bytes:
        """The usage chunk, if it was asked for."""
        return self._chunks.closing(done)

    def _with_echo(self, choice: _Choice, delta: Delta) -> tuple[str, tuple[int, ...], tuple[TokenLogprob | None, ...]]:
        """Text, tokens and log-probabilities of a delta; the first of a choice brings the echoed prompt."""
        text, tokens = delta.text, delta.token_ids
        entries: tuple[TokenLogprob | None, ...] = delta.logprobs
        if self._echo and not choice.echoed:
            text = self._codec.decode(choice.prompt) + text
            tokens = (*choice.prompt, *tokens)
            entries = (*(delta.prompt_logprobs or ()), *entries)
        choice.echoed = True
        return text, tokens, entries

    # --- whole ------------------------------------------------------------------------------------

    def add(self, index: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        choice = self._choices[index]
        text, tokens, entries = self._with_echo(choice, delta)
        choice.text.append(text)
        choice.tokens += tokens
        choice.logprobs += entries
        choice.reason = delta.finish_reason

    def whole(self, done: Done) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": self._logprobs(choice),
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return {
            **self._head,
            "choices": choices,
            "usage": usage(done.prompt_tokens, done.completion_tokens, done.cached_tokens),
        }

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return completion_logprobs(tuple(choice.logprobs), tuple(choice.tokens), self._codec, choice.offsets)
