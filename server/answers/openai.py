"""OpenAI's JSON for engine events: chat completions and text completions, whole or as server-sent chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bigmodel.server.answers.json_in_parts import JSONText, json_in_parts, written
from bigmodel.server.answers.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from bigmodel.server.answers.parsers.formats import AnswerFormat
from bigmodel.server.answers.parsers.parts import (
    AnswerPart,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
    ToolCall,
)
from bigmodel.server.answers.parsers.reader import AnswerParser
from bigmodel.server.answers.sse import COMMENT, event
from bigmodel.server.engine.scheduling.request import Delta, Done, TokenLogprob
from bigmodel.server.text.codec import TextCodec

DONE = b"data: [DONE]\n\n"


def usage(done: Done, reasoning: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object. ``reasoning``: tokens of it, where an answer may have some."""
    details = {} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return {
        **details,
        **_token_counts(done.prompt_tokens, done.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }


def _token_counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Chunks:
    """Chunks of one answer. The common JSON of ``head`` is serialised once, not for every token.

    With ``wants_usage`` a last chunk has the usage, and with ``continuous_usage`` the others have that of their choice
    up to them.
    """

    def __init__(self, head: Mapping[str, Any], wants_usage: bool, continuous_usage: bool) -> None:
        self._wants_usage = wants_usage
        self._continuous_usage = continuous_usage
        self._head = json.dumps(head)[:-1]
        self._before = f'{self._head}, "choices": [{{"index": '
        self._after = '}], "usage": null}' if wants_usage else "}]}"

    def of_choice(self, index: int, fields: str, prompt: int, completion: int) -> bytes:
        """A chunk of one choice; ``fields`` is the JSON of its members other than the index.

        ``prompt`` and ``completion``: tokens of the choice up to here.
        """
        after = self._after
        if self._continuous_usage:
            after = f'}}], "usage": {json.dumps(_token_counts(prompt, completion))}}}'
        return event(f"{self._before}{index}, {fields}{after}")

    def closing(self, done: Done, reasoning: int | None = None) -> bytes:
        """The usage chunk, if requested, and the end of the stream."""
        if not self._wants_usage:
            return DONE
        numbers = json.dumps(usage(done, reasoning))
        return event(f'{self._head}, "choices": [], "usage": {numbers}}}') + DONE


def failed(error: dict[str, Any]) -> bytes:
    """The last event of a stream that failed."""
    return event(json.dumps({"error": error}))


# --- text completions ---------------------------------------------------------------------------------


@dataclass
class _CompletionChoice:
    prompt: list[int]
    offsets: TextOffsets
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    reason: str | None = None
    echoed: bool = False
    streamed: int = 0  # tokens


class CompletionAnswer:
    """The answer to a completion of ``prompts``, ``n`` choices each; choice i of prompt p has index p * n + i."""

    alive = COMMENT

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
        continuous_usage: bool = False,
    ) -> None:
        self._head: dict[str, Any] = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._chunks = Chunks(self._head, usage, continuous_usage)
        self._codec = codec
        self._echo = echo
        self._wants_logprobs = logprobs
        self._choices = [
            _CompletionChoice(prompt, TextOffsets(codec, () if echo else prompt))
            for prompt in prompts
            for _ in range(n)
        ]

    def opening(self) -> bytes:
        """Empty: a completion names no role."""
        return b""

    def chunk(self, index: int, delta: Delta) -> bytes:
        """The event of a delta."""
        choice = self._choices[index]
        text, tokens, entries = self._with_echo(choice, delta)
        logprobs = "null"
        if self._wants_logprobs:
            found = completion_logprobs(entries, tokens, self._codec, choice.offsets)
            logprobs = json_in_parts(found, ascii_only=True)  # of an echoed prompt it is large
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        fields = f'"text": {json.dumps(text)}, "logprobs": {logprobs}, "finish_reason": {reason}'
        choice.streamed += len(delta.token_ids)
        return self._chunks.of_choice(index, fields, len(choice.prompt), choice.streamed)

    def closing(self, done: Done) -> bytes:
        """The usage chunk, if requested, and the end of the stream."""
        return self._chunks.closing(done)

    def failed(self, status: int, error: dict[str, Any]) -> bytes:
        """The error as an event."""
        return failed(error)

    def _with_echo(
        self, choice: _CompletionChoice, delta: Delta
    ) -> tuple[str, tuple[int, ...], tuple[TokenLogprob | None, ...]]:
        """Text, tokens and log-probabilities of a delta; the first of a choice starts with the echoed prompt."""
        text, tokens = delta.text, delta.token_ids
        entries: tuple[TokenLogprob | None, ...] = delta.logprobs
        if self._echo and not choice.echoed:
            text = self._codec.decode(choice.prompt) + text
            tokens = (*choice.prompt, *tokens)
            entries = (*(delta.prompt_logprobs or ()), *entries)
        choice.echoed = True
        return text, tokens, entries

    def add(self, index: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        choice = self._choices[index]
        text, tokens, entries = self._with_echo(choice, delta)
        choice.text.append(text)
        choice.tokens += tokens
        choice.logprobs += entries
        choice.reason = delta.finish_reason

    def whole(self, done: Done) -> bytes:
        """The whole answer, as JSON."""
        choices = [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": self._logprobs(choice),
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return json_in_parts({**self._head, "choices": choices, "usage": usage(done)}).encode()

    def _logprobs(self, choice: _CompletionChoice) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return completion_logprobs(tuple(choice.logprobs), tuple(choice.tokens), self._codec, choice.offsets)


# --- chat completions ---------------------------------------------------------------------------------


@dataclass
class _ChatChoice:
    parser: AnswerParser | None
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    complete_calls: int = 0
    logprobs: list[JSONText] = field(default_factory=list)
    reason: str | None = None
    streamed: int = 0  # tokens
    tokens: int = 0
    reasoning_tokens: int = 0
    answers: bool = False  # has something other than reasoning

    def read(self, delta: Delta) -> list[AnswerPart]:
        """The parts of the answer in a delta; at the end also what the parser held back."""
        if self.parser is None:
            return [Content(delta.text)] if delta.text else []
        parts = self.parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self.parser.finish()
        self.tokens += len(delta.token_ids)
        self.answers = self.answers or any(not isinstance(part, Reasoning) for part in parts)
        if parts and not self.answers:
            self.reasoning_tokens = self.tokens
        return parts

    def note_call(self, name: str, call_id: str, arguments: str = "", *, complete: bool = True) -> dict[str, Any]:
        """Add a call; returns its JSON."""
        self.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        self.complete_calls += complete
        return self.calls[-1]

    def finish_reason(self, reason: str) -> str:
        """Why the answer ended: "tool_calls" where it has complete ones and came to its end."""
        return "tool_calls" if self.complete_calls and reason == "stop" else reason


class ChatAnswer:
    """The answer to a chat of ``n`` choices; ``answer_format`` tells tool calls and reasoning from the content.

    Reasoning is left out unless the answer ``shows_reasoning``. ``prompt_tokens`` are shown with ``continuous_usage``.
    """

    alive = COMMENT

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        n: int,
        codec: TextCodec,
        *,
        logprobs: bool,
        usage: bool,
        answer_format: AnswerFormat | None = None,
        shows_reasoning: bool = True,
        prompt_tokens: int = 0,
        continuous_usage: bool = False,
    ) -> None:
        self._head: dict[str, Any] = {"id": answer_id, "object": "chat.completion", "created": created, "model": model}
        self._chunks = Chunks({**self._head, "object": "chat.completion.chunk"}, usage, continuous_usage)
        self._prompt_tokens = prompt_tokens
        self._codec = codec
        self._wants_logprobs = logprobs
        self._format = answer_format
        self._shows_reasoning = shows_reasoning
        self._choices = [_ChatChoice(None if answer_format is None else answer_format.parser()) for _ in range(n)]

    def opening(self) -> bytes:
        """One chunk per choice, with the role."""
        role = '{"role": "assistant", "content": ""}'
        return b"".join(self._chunk(index, role, "null", "null") for index in range(len(self._choices)))

    def chunk(self, index: int, delta: Delta) -> bytes:
        """The events of a delta, one for each part of the answer; the finish reason is a chunk of its own."""
        choice = self._choices[index]
        choice.streamed += len(delta.token_ids)
        pieces = [piece for part in self._shown(choice.read(delta)) if (piece := self._piece(choice, part))]
        if not pieces and delta.logprobs and self._wants_logprobs:
            pieces = ['{"content": ""}']  # text that is held back has log-probabilities all the same
        logprobs = "null"
        if self._wants_logprobs:
            logprobs = json.dumps(chat_logprobs(delta.logprobs, self._codec))
        out = b""
        for piece in pieces:
            out += self._chunk(index, piece, logprobs, "null")
            logprobs = "null"
        if delta.finish_reason is not None:
            out += self._chunk(index, "{}", "null", f'"{choice.finish_reason(delta.finish_reason)}"')
        return out

    def _piece(self, choice: _ChatChoice, part: AnswerPart) -> str:
        """The delta of a chunk, as JSON; empty for the end of a call."""
        if isinstance(part, Arguments):
            last = len(choice.calls) - 1
            return f'{{"tool_calls": [{{"index": {last}, "function": {{"arguments": {json.dumps(part.text)}}}}}]}}'
        if isinstance(part, ToolCall | CallBegun | CallEnded):
            call = self._note(choice, part)
            return "" if call is None else json.dumps({"tool_calls": [{"index": len(choice.calls) - 1, **call}]})
        name = "content" if isinstance(part, Content) else "reasoning_content"
        return f'{{"{name}": {json.dumps(part.text)}}}'

    def _note(self, choice: _ChatChoice, part: ToolCall | CallBegun | CallEnded) -> dict[str, Any] | None:
        """Note a call or the end of one; returns the JSON of a new one."""
        if isinstance(part, CallEnded):
            choice.complete_calls += part.complete
            return None
        if isinstance(part, CallBegun):
            return choice.note_call(part.name, self._call_id(choice, part.name), complete=False)
        return choice.note_call(part.name, self._call_id(choice, part.name), part.arguments)

    def _shown(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        return parts if self._shows_reasoning else [part for part in parts if not isinstance(part, Reasoning)]

    def _call_id(self, choice: _ChatChoice, name: str) -> str:
        assert self._format is not None  # nothing else finds calls
        return self._format.new_id(name, len(choice.calls))

    def closing(self, done: Done) -> bytes:
        """The usage chunk, if requested, and the end of the stream."""
        return self._chunks.closing(done, self._reasoning_tokens)

    @property
    def _reasoning_tokens(self) -> int | None:
        return None if self._format is None else sum(choice.reasoning_tokens for choice in self._choices)

    def failed(self, status: int, error: dict[str, Any]) -> bytes:
        """The error as an event."""
        return failed(error)

    def _chunk(self, index: int, delta: str, logprobs: str, reason: str) -> bytes:
        fields = f'"delta": {delta}, "logprobs": {logprobs}, "finish_reason": {reason}'
        return self._chunks.of_choice(index, fields, self._prompt_tokens, self._choices[index].streamed)

    def add(self, index: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        choice = self._choices[index]
        for part in self._shown(choice.read(delta)):
            if isinstance(part, Arguments):
                choice.calls[-1]["function"]["arguments"] += part.text
            elif isinstance(part, ToolCall | CallBegun | CallEnded):
                self._note(choice, part)
            else:
                (choice.content if isinstance(part, Content) else choice.reasoning).append(part.text)
        if self._wants_logprobs:
            choice.logprobs += map(written, chat_logprobs(delta.logprobs, self._codec)["content"])
        choice.reason = None if delta.finish_reason is None else choice.finish_reason(delta.finish_reason)

    def whole(self, done: Done) -> bytes:
        """The whole answer, as JSON."""
        choices = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._wants_logprobs else None,
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        body = {**self._head, "choices": choices, "usage": usage(done, self._reasoning_tokens)}
        if self._wants_logprobs:
            return json_in_parts(body).encode()
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _message(choice: _ChatChoice) -> dict[str, Any]:
    content = "".join(choice.content)
    shown = None if choice.calls and not content else content
    message: dict[str, Any] = {"role": "assistant", "content": shown, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls:
        message["tool_calls"] = choice.calls
    return message
