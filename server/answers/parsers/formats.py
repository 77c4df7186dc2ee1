"""Which formats of tool calls and of reasoning there are, which of them a model writes, and the parser of an answer."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from bigmodel.errors import ServeError
from bigmodel.server.answers.parsers import (
    deepseek,
    function_gemma,
    gemma,
    glm,
    glm4,
    harmony,
    hermes,
    invoke_xml,
    kimi,
    llama3,
    llama4,
    mistral,
    qwen_xml,
    think,
)
from bigmodel.server.answers.parsers.call_text import read_list
from bigmodel.server.answers.parsers.calls import Tools
from bigmodel.server.answers.parsers.reader import AnswerParser, Reading, TextReader
from bigmodel.server.text.codec import TextCodec

AUTO, NONE, HARMONY = "auto", "none", "harmony"

NewId: TypeAlias = Callable[[str, int], str]
"""Makes an identifier of a call, from the name of its function and the number of calls before it."""


def new_id(name: str, number: int) -> str:
    """Return an identifier of a call of a function; ``number``: how many calls came before it in the conversation."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls: its parser, its markers, and the identifiers of calls it accepts.

    ``around``: the markers before and behind calls, where there are both.
    """

    read: Callable[[TextReader, Tools], Reading[None]]
    markers: tuple[str, ...]
    around: tuple[str, str] | None = None
    new_id: NewId = new_id


_TAGS = (hermes.BEGIN, hermes.END)
_HARMONY_MARKERS = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, *harmony.ENDS)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek": ToolFormat(deepseek.read, deepseek.MARKS.all, (deepseek.CALLS, deepseek.CALLS_END)),
    "deepseek-dsml": ToolFormat(
        invoke_xml.reading(invoke_xml.DEEPSEEK), invoke_xml.DEEPSEEK.all, invoke_xml.DEEPSEEK.blocks[0]
    ),
    "function-gemma": ToolFormat(
        function_gemma.reading(function_gemma.FUNCTION_GEMMA), function_gemma.FUNCTION_GEMMA.all
    ),
    "gemma": ToolFormat(gemma.read, ()),
    "gemma4": ToolFormat(function_gemma.reading(function_gemma.GEMMA_4), function_gemma.GEMMA_4.all),
    "glm": ToolFormat(glm.read, (*_TAGS, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END), _TAGS),
    "glm4": ToolFormat(glm4.read, (glm4.NEXT,)),
    HARMONY: ToolFormat(lambda reader, tools: harmony.read(reader, tools, reader.content), _HARMONY_MARKERS),
    "hermes": ToolFormat(hermes.read, _TAGS, _TAGS),
    "kimi": ToolFormat(kimi.read, kimi.MARKS.all, (kimi.MARKS.calls, kimi.MARKS.calls_end), kimi.new_id),
    "llama3": ToolFormat(llama3.read, (llama3.TAG,)),
    "llama4": ToolFormat(llama4.read, (llama4.START, llama4.END)),
    "minimax": ToolFormat(invoke_xml.reading(invoke_xml.MINIMAX), invoke_xml.MINIMAX.all, invoke_xml.MINIMAX.blocks[0]),
    "mistral": ToolFormat(mistral.read, (mistral.CALLS, mistral.CALL_ID, mistral.ARGS), new_id=mistral.new_id),
    "qwen-xml": ToolFormat(qwen_xml.read, (*_TAGS, *qwen_xml.MARKERS), _TAGS),
}

_GEMMA_4_CHANNEL = "<|channel>"

REASONING_TAGS: dict[str, tuple[str, str]] = {
    "gemma4": (f"{_GEMMA_4_CHANNEL}thought", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "think": ("<think>", "</think>"),
}


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raise ServeError for a parser that there is not."""
    for option, name, known in (
        ("tool parser", tool_parser, (*TOOL_FORMATS,)),
        ("reasoning parser", reasoning_parser, (*REASONING_TAGS, HARMONY)),
    ):
        if name not in (AUTO, NONE, *known):
            raise ServeError(f"'{name}' is no {option}; there are {', '.join((AUTO, NONE, *sorted(known)))}")


# --- which of them a model writes ---------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFormats:
    """Names of the formats that a model writes, or None."""

    tools: str | None = None
    reasoning: str | None = None

    def ends_within_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends with the first tag of the reasoning."""
        tags = REASONING_TAGS.get(self.reasoning or "")
        return tags is not None and prompt.rstrip().endswith(tags[0])

    def ends_behind_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends with the last tag of the reasoning, as where it is switched off."""
        tags = REASONING_TAGS.get(self.reasoning or "")
        return tags is not None and prompt.rstrip().endswith(tags[1])


def formats_of(codec: TextCodec, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> ModelFormats:
    """Return the formats that the settings name, or that the chat template and the special tokens show."""
    template, special = codec.template_source, codec.special_texts
    tools = _tool_format(template, special) if tool_parser == AUTO else tool_parser
    reasoning = _reasoning_format(template) if reasoning_parser == AUTO else reasoning_parser
    return ModelFormats(None if tools == NONE else tools, None if reasoning == NONE else reasoning)


def _tool_format(template: str, special: Mapping[str, int]) -> str | None:
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return HARMONY
    if deepseek.CALLS in template:
        return "deepseek"
    if invoke_xml.DSML in template or invoke_xml.DSML in special:
        return "deepseek-dsml"
    if kimi.MARKS.calls in template:
        return "kimi"
    if invoke_xml.MINIMAX.blocks[0][0] in template:
        return "minimax"
    if mistral.CALLS in template or (mistral.CALLS in special and "[INST]" in template):
        return "mistral"
    if glm.KEY in template:
        return "glm"
    if hermes.BEGIN in template:
        return "qwen-xml" if qwen_xml.FUNCTION in template else "hermes"
    if "[gMASK]" in template and "tools" in template:
        return "glm4"
    if "tools" in template and (llama4.START in template or llama4.START in special):
        return "llama4"
    if "tools" in template and (llama3.TAG in template or llama3.TAG in special):
        return "llama3"
    if function_gemma.FUNCTION_GEMMA.begin in template:
        return "function-gemma"
    if function_gemma.GEMMA_4.begin in template:
        return "gemma4"
    return "gemma" if "<start_of_turn>" in template else None


def _reasoning_format(template: str) -> str | None:
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return HARMONY
    return next((name for name, tags in sorted(REASONING_TAGS.items()) if tags[1] in template), None)


# --- the parser of an answer --------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one request are read.

    Args:
        formats: Formats of the model.
        special: Text and id of the tokenizer's special tokens.
        schemas: Schemas of the arguments of each function that may be called.
        strict: Names of those whose arguments have to fit their schema.
        single: Whether an answer ends with its first call.
        forced: Whether a grammar holds the answer to calls: a JSON list of them, or harmony's messages.
        opened: Whether the prompt ends with the first tag of the reasoning.
        closed: Whether it ends with the last one: the model does not reason.
        streams: Whether the answer is streamed: arguments of calls that are JSON come in pieces.
        calls_before: Calls in the conversation so far.
    """

    formats: ModelFormats
    special: Mapping[str, int] = field(default_factory=dict)
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    single: bool = False
    forced: bool = False
    opened: bool = False
    closed: bool = False
    streams: bool = False
    calls_before: int = 0

    def new_id(self, name: str, number: int) -> str:
        """Return an identifier of a call of a function, the ``number``-th of the answer from 0 on."""
        make = TOOL_FORMATS[self.formats.tools].new_id if self.formats.tools in TOOL_FORMATS else new_id
        return make(name, self.calls_before + number)

    @property
    def kept(self) -> dict[int, str]:
        """Id and text of the special tokens that the parser needs to see."""
        return {self.special[marker]: marker for marker in self._markers() if marker in self.special}

    def _markers(self) -> tuple[str, ...]:
        names = (self.formats.tools, self.formats.reasoning)
        markers: tuple[str, ...] = _HARMONY_MARKERS if HARMONY in names else ()
        if self.schemas and self.formats.tools in TOOL_FORMATS and not self.forced:
            markers += TOOL_FORMATS[self.formats.tools].markers
        tags = REASONING_TAGS.get(self.formats.reasoning or "", ())
        return (*markers, *tags, *(each for each in (_GEMMA_4_CHANNEL,) if any(tag.startswith(each) for tag in tags)))

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        reader = TextReader(self.kept.values(), single=self.single, streams=self.streams)
        return AnswerParser(reader, self._reading(reader))

    def _own_format(self) -> ToolFormat | None:
        return TOOL_FORMATS.get(self.formats.tools or "")

    def _reading(self, reader: TextReader) -> Reading[None]:
        tools = Tools(self.schemas, self.strict)
        reasoning = self.formats.reasoning
        if reasoning in REASONING_TAGS:
            begin, end = REASONING_TAGS[reasoning]
            calls = None if self.forced or not self.schemas else self._own_format()
            around = None if calls is None else calls.around
            yield from think.read(reader, begin, end, opened=self.opened, calls=around)
        if self.forced and self.formats.tools != HARMONY:
            before = yield from reader.space()
            before += yield from reader.starts("[")
            yield from read_list(reader, tools, before)
            return
        read: Callable[[TextReader, Tools], Reading[None]] | None = None
        if reasoning == HARMONY:
            read = partial(harmony.read, analysis=reader.reasoning)
            tools = tools if self.formats.tools == HARMONY else Tools({})
        elif self.schemas and self.formats.tools is not None:
            read = TOOL_FORMATS[self.formats.tools].read
        if read is not None:
            yield from read(reader, tools)
