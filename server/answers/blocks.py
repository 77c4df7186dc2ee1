"""The blocks of an answer: what is next to each other of one kind belongs to one, and each call is one of its own.

The interfaces that send answers block by block (Anthropic's messages, OpenAI's responses) are written over these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from bigmodel.server.answers.parsers.formats import AnswerFormat, NewId, new_id
from bigmodel.server.answers.parsers.parts import (
    AnswerPart,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
    ToolCall,
)
from bigmodel.server.engine.scheduling.request import Delta, TokenLogprob

Kind: TypeAlias = Literal["reasoning", "content", "call"]


@dataclass
class Block:
    """One block; of a call, the text is that of its arguments, and it has a name and an identifier.

    A call is not ``complete`` whose arguments come in pieces and have not ended, or broke off.
    """

    index: int
    kind: Kind
    name: str = ""
    call_id: str = ""
    complete: bool = True
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True)
class Grown:
    """A block has more text, whose tokens have these log-probabilities, where they were asked for."""

    block: Block
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Closed:
    """A block is complete."""

    block: Block


BlockEvent: TypeAlias = Opened | Grown | Closed


class BlockReader:
    """Reads the deltas of one answer.

    Args:
        answer_format: How the answer is read; None if all of it is content.
        shows_reasoning: Whether reasoning becomes blocks; else it is dropped.
    """

    def __init__(self, answer_format: AnswerFormat | None, *, shows_reasoning: bool = True) -> None:
        self._parser = None if answer_format is None else answer_format.parser()
        self._new_id: NewId = new_id if answer_format is None else answer_format.new_id
        self._shows_reasoning = shows_reasoning
        self._open: Block | None = None
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self.tokens = 0
        self.reasoning_tokens = 0
        """Tokens until the first part that is not reasoning, where there is some."""
        self._reasons = False
        self._answers = False
        self._unshown: tuple[TokenLogprob, ...] = ()  # of tokens whose text is held back

    @property
    def calls(self) -> bool:
        """Whether there is a complete call."""
        return any(block.kind == "call" and block.complete for block in self.blocks)

    def read(self, delta: Delta) -> list[BlockEvent]:
        """Return the blocks that a delta begins, adds to and ends. The last delta ends the last block."""
        parts = self._parts(delta)
        self._count(delta, parts)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop = delta.finish_reason, delta.stop
        self._unshown += delta.logprobs
        events: list[BlockEvent] = []
        for part in parts:
            logprobs, self._unshown = self._unshown, ()
            events += self._read_part(part, logprobs)
        if delta.finish_reason is not None:
            events += self._close()
        return events

    def _parts(self, delta: Delta) -> list[AnswerPart]:
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        parts = self._parser.push(delta.text)
        return parts if delta.finish_reason is None else parts + self._parser.finish()

    def _count(self, delta: Delta, parts: list[AnswerPart]) -> None:
        self.tokens += len(delta.token_ids)
        self._reasons = self._reasons or any(isinstance(part, Reasoning) for part in parts)
        self._answers = self._answers or any(not isinstance(part, Reasoning) for part in parts)
        if self._reasons and not self._answers:
            self.reasoning_tokens = self.tokens

    def _read_part(self, part: AnswerPart, logprobs: tuple[TokenLogprob, ...]) -> Iterator[BlockEvent]:
        if isinstance(part, Reasoning) and not self._shows_reasoning:
            return
        if isinstance(part, ToolCall | CallBegun):
            yield from self._open_block("call", part.name, complete=isinstance(part, ToolCall))
            if isinstance(part, ToolCall):
                yield self._grown(part.arguments)
                yield from self._close()
        elif isinstance(part, Arguments):
            yield self._grown(part.text)
        elif isinstance(part, CallEnded):
            self.blocks[-1].complete = part.complete
            yield from self._close()
        else:
            kind: Kind = "reasoning" if isinstance(part, Reasoning) else "content"
            if self._open is None or self._open.kind != kind:
                yield from self._open_block(kind)
            yield self._grown(part.text, logprobs if kind == "content" else ())

    def _open_block(self, kind: Kind, name: str = "", *, complete: bool = True) -> Iterator[BlockEvent]:
        yield from self._close()
        calls = sum(block.kind == "call" for block in self.blocks)
        block = Block(len(self.blocks), kind, name, self._new_id(name, calls) if kind == "call" else "", complete)
        self._open = block
        self.blocks.append(block)
        yield Opened(block)

    def _grown(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> Grown:
        block = self.blocks[-1]
        block.pieces.append(text)
        block.logprobs += logprobs
        return Grown(block, text, logprobs)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            block, self._open = self._open, None
            yield Closed(block)
