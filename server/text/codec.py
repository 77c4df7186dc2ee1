"""The tokenizer as the server uses it: encode, decode, chat templates, the bytes of one token.

`Detokenizer` and `StopChecker` turn generated tokens into text piece by piece: never half a character, never past a
stop string.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any, TypeVar

from bigmodel.errors import ServeError
from bigmodel.server.text import long_texts

T = TypeVar("T")

TEMPLATE_SECONDS = 10.0
"""How long a chat template may take."""

_BYTES = 4  # of the longest UTF-8 character
_REPLACEMENT = "\ufffd"
_LONG = 32  # undecoded tokens from which a run of invalid bytes is shortened


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """Inverse of the byte-to-letter table of byte-level tokenizers.

    Printable Latin-1 letters stand for themselves; the other bytes, in order, for letters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_FOR_CLIENTS = frozenset({"documents", "continue_final_message"})
"""Arguments of transformers' `apply_chat_template` that clients may set, beside the template's variables."""


class TemplateError(ServeError, ValueError):
    """The chat template refused its input."""


class TemplateTimeError(ServeError):
    """The chat template did not end in time."""


class TooManyTokensError(ServeError, ValueError):
    """A text has more tokens than were asked for: `least` or more."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the text has {least} tokens or more")
        self.least = least


class TextCodec:
    """Wraps a transformers tokenizer. Thread-safe.

    ``not_for_templates``: names that template variables cannot have, because they are arguments of the template call.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocabulary_size = len(tokenizer)
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self._byte_level = self._is_byte_level()
        self._long = long_texts.LongTexts(tokenizer)
        apply = getattr(tokenizer, "apply_chat_template", None)
        if apply is not None:
            from bigmodel.server.text.template_bounds import bound_templates  # imports transformers' templates

            bound_templates()
        own = () if apply is None else inspect.signature(apply).parameters
        self.not_for_templates = frozenset({"self", "messages", *own}) - _FOR_CLIENTS

    @cached_property
    def special_texts(self) -> dict[str, int]:
        """Text and id of each token that decoding leaves out."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        found = {token.content: token_id for token_id, token in added.items() if token.special}
        return {**{self.tokenizer.convert_ids_to_tokens(token_id): token_id for token_id in self.special_ids}, **found}

    @property
    def template_source(self) -> str:
        """The text of the chat template, of all of them if there are several; empty without one."""
        template = getattr(self.tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def has_variable(self, name: str) -> bool:
        """Whether the chat template has a variable: no attribute, no text and no part of another name."""
        return re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", self.template_source) is not None

    def encode(self, text: str, *, add_special_tokens: bool = True, longest: int | None = None) -> list[int]:
        """Return the tokens of a text.

        It ends when a client leaves, see `long_texts.left`: a long text is tokenised in a process that is ended then,
        unless the tokenizer is written in Python. It cannot be cut into pieces between which one would look: only of
        some tokenizers are the tokens of the pieces those of the text. Unigram models choose the likeliest tokens of
        all of it, BPE without a split before it merges across white space, and normalisers put a prefix before each
        text and compose characters across a cut.

        Raises:
            TooManyTokensError: they are more than `longest`. A far longer text is not tokenised to its end.
            EncodeError: a long text takes too much time or memory, or the tokenizer fails at it.
        """
        # A text cut within a word may have a few tokens more than the same part of the whole text.
        size = len(text) if longest is None else 2 * longest + 64
        while size < len(text):
            found = self._count(text[:size], add_special_tokens)
            if longest is not None and found > longest + 64:
                raise TooManyTokensError(longest + 1)
            size *= 2
        tokens = self._encode(text, add_special_tokens)
        if longest is not None and len(tokens) > longest:
            raise TooManyTokensError(len(tokens))
        return tokens

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        found = self._outside((text,), ("ids",), special=add_special_tokens)
        if found is not None:
            return found[0]
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def _count(self, text: str, add_special_tokens: bool) -> int:
        found = self._outside((text,), ("count",), special=add_special_tokens)
        return len(self.tokenizer.encode(text, add_special_tokens=add_special_tokens)) if found is None else found[0][0]

    def encode_pair(self, first: str, second: str | None = None) -> tuple[list[int], list[int]]:
        """Tokens and token types of a text, or of two that belong together; no types where the tokenizer gives none."""
        found = self._outside((first, second) if second else (first,), ("ids", "type_ids"), special=True)
        if found is not None:
            ids, types = found
            return ids, types if "token_type_ids" in self.tokenizer.model_input_names else []
        encoded = self.tokenizer(first) if second is None else self.tokenizer(first, second)
        return list(encoded["input_ids"]), list(encoded.get("token_type_ids") or ())

    def shortened(self, text: str, tokens: int) -> str:
        """The beginning of a text that has so many tokens or a little fewer, special ones not counted."""
        size = 8 * max(0, tokens) + 64
        while True:
            part = text[:size]
            places = self._places(part)
            # A text cut within a word may have a few tokens more than the same part of the whole text.
            if len(places) > tokens + 64 or size >= len(text):
                break
            size *= 4
        if len(places) <= tokens:
            return part
        kept = max(0, tokens)
        while kept and places[kept][0] < places[kept - 1][1]:  # within a character of several tokens
            kept -= 1
        return part[: places[kept - 1][1]] if kept else ""

    def _places(self, text: str) -> list[tuple[int, int]]:
        """Where each token of a text begins and ends in it, special ones left out."""
        found = self._outside((text,), ("offsets",), special=False)
        if found is not None:
            return list(zip(found[0][::2], found[0][1::2]))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["offset_mapping"])

    def _outside(self, texts: Sequence[str], wanted: Sequence[str], *, special: bool) -> list[list[int]] | None:
        """What is wanted of long texts whose client may leave, see `LongTexts`; None of others."""
        leaves = long_texts.left.get()
        if leaves is None or sum(map(len, texts)) < long_texts.LONG:
            return None
        return self._long.encode(texts, wanted, leaves, special=special)

    def close(self) -> None:
        """End the processes that tokenise long texts."""
        self._long.close()

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; incomplete characters become U+FFFD."""
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text, in the model's chat template (a plain one if it has none).

        Raises:
            TemplateError: the template raises, makes something too large, or takes no tools and some are given.
            TemplateTimeError: it does not end within `TEMPLATE_SECONDS`.
        """
        try:
            template = self._template(tools)
            if tools and "tools" not in template:
                raise TemplateError("the model's chat template has no place for tools; leave them out")
            render = partial(
                self.tokenizer.apply_chat_template,
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(extra or {}),
            )
            text: str = _templates.ended_after(TEMPLATE_SECONDS, render)
        except (TemplateError, TemplateTimeError):
            raise
        except Exception as error:  # templates are programs: they may raise anything
            raise TemplateError(f"the chat template refused the messages: {error}") from error
        return text

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        """The model's template; of several, the one for ``tools``."""
        if not getattr(self.tokenizer, "chat_template", None):
            return _PLAIN_TEMPLATE
        template: str = self.tokenizer.get_chat_template(tools=tools)
        return template

    def pieces(self, ids: list[int]) -> list[str]:
        """The vocabulary's names of tokens, such as "Ġthe"; empty for tokens that have none."""
        return [piece or "" for piece in self.tokenizer.convert_ids_to_tokens(ids)]

    def token_text(self, token_id: int) -> str:
        """Text of one token within a longer text."""
        alone = self.decode([token_id], skip_special_tokens=False)
        if self._byte_level:
            return alone
        # Other tokenizers may strip the leading space of a text.
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(alone) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; exact for byte-level tokenizers and byte-fallback tokens."""
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        if piece is None or token_id in self.special_ids:
            return self.token_text(token_id).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if self._byte_level:
            table = _byte_of_letter()
            if all(letter in table for letter in piece):
                return bytes(table[letter] for letter in piece)
        return self.token_text(token_id).encode()

    def _is_byte_level(self) -> bool:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return "ByteLevel" in str(getattr(backend, "decoder", None))


class _TimeIsOver(BaseException):
    """Raised in a thread from another one; no Exception, which a library may catch."""


@dataclass(eq=False)
class _Call:
    """When a function is told to end, and whether it was."""

    end: float
    told: bool = False


class _TimeLimits:
    """Ends functions that take too long, by an exception that their threads raise at their next instruction."""

    def __init__(self) -> None:
        self._calls: dict[_Call, int] = {}  # with their threads, until the function returns or is about to be told
        self._begun = threading.Event()
        self._lock = threading.Lock()
        self._watching: threading.Thread | None = None

    def ended_after(self, seconds: float, function: Callable[[], T]) -> T:
        """Return what `function` returns. Raises TemplateTimeError if it does not return within so many seconds."""
        call = _Call(time.monotonic() + seconds)
        self._calls[call] = threading.get_ident()
        try:
            try:
                self._watch()
                result = function()
            except _TimeIsOver:
                raise
            except BaseException:
                self._end(call)
                raise
            else:
                self._end(call)
                return result
        except _TimeIsOver:
            raise TemplateTimeError(f"the model's chat template did not end within {seconds:g} seconds") from None

    def _end(self, call: _Call) -> None:
        """Leave a function that has ended. If it was told to end, the exception comes here at the latest.

        It is not taken back: until 3.12, CPython would look for it in all threads for ever, which slows them, and ends
        in an endless loop where one of them is traced.
        """
        if self._calls.pop(call, None) is None:
            while not call.told:
                time.sleep(0.001)
            time.sleep(0)

    def _watch(self) -> None:
        self._begun.set()
        if self._is_watched():
            return
        with self._lock:
            if not self._is_watched():
                self._watching = threading.Thread(target=self._end_all, name="chat templates", daemon=True)
                self._watching.start()

    def _is_watched(self) -> bool:
        return self._watching is not None and self._watching.is_alive()  # not in a forked process

    def _end_all(self) -> None:
        while self._begun.wait():
            self._begun.clear()
            while calls := list(self._calls):
                call = min(calls, key=lambda each: each.end)
                left = call.end - time.monotonic()
                if left > 0:
                    time.sleep(left)
                elif (thread := self._calls.pop(call, None)) is not None:  # its thread may have a later one by now
                    _raise_in(thread, _TimeIsOver)
                    call.told = True


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Have a thread raise an exception at its next instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


_templates = _TimeLimits()


# Used for models without a template (base models): one line per message.
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Detokenizer:
    """Decodes a growing list of tokens into pieces of text whose concatenation is the whole text.

    The text of a token may depend on the one before (a leading space, a partial character), so each piece is decoded
    together with the tokens of the piece before; the first one with the end of the ``prompt``. A trailing U+FFFD may be
    the first bytes of a character: it is held back until the next token.

    Special tokens have no text, but those in ``kept``, by id.
    """

    def __init__(
        self, codec: TextCodec, prompt: Sequence[int] = (), kept: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self._codec = codec
        self._kept = kept
        self._before = self._end_of(prompt)  # tokens of the last whole piece, already given out
        self._before_text = codec.decode(self._before)
        self._unread: list[int] = []
        self._shown = 0  # characters of the undecoded tokens' text already given out

    def add(self, token_id: int) -> str:
        """The text completed by ``token_id``; empty while a character is incomplete."""
        if token_id in self._kept:
            return (self.flush() if self._unread else "") + self._kept[token_id]
        if token_id in self._codec.special_ids:
            return ""
        self._unread.append(token_id)
        text = self._text()
        incomplete = text.endswith(_REPLACEMENT)
        stable = text[:-1] if incomplete else text
        piece = stable[self._shown :]
        self._shown = len(stable)
        if text and not incomplete:
            self._before, self._unread, self._shown = self._unread, [], 0
            self._before_text = self._codec.decode(self._before)
        elif len(self._unread) >= _LONG:
            self._shorten()
        return piece

    def flush(self) -> str:
        """The rest when no more tokens come; an incomplete character becomes U+FFFD."""
        text = self._text()[self._shown :]
        self._before, self._before_text, self._unread, self._shown = [], "", [], 0
        return text

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of ``prompt`` that decode to whole characters; none if the last four do not."""
        for count in range(1, _BYTES + 1):
            end = list(prompt[-count:])
            if not self._codec.decode(end).endswith(_REPLACEMENT):
                return end
        return []

    def _text(self) -> str:
        return self._codec.decode(self._before + self._unread)[len(self._before_text) :]

    def _shorten(self) -> None:
        """Drop leading tokens already given out, where decoding the rest alone gives the same text."""
        whole = self._text()
        for cut in range(len(self._unread) - 4, 0, -1):
            tail = self._codec.decode(self._unread[cut:])
            dropped = len(whole) - len(tail)
            if dropped <= self._shown and whole.endswith(tail):
                head = self._codec.decode(self._before + self._unread[:cut])[len(self._before_text) :]
                if head + tail == whole:
                    self._before, self._before_text = [], ""
                    self._unread = self._unread[cut:]
                    self._shown -= dropped
                    return


class StopChecker:
    """Passes text through until a stop string appears, also across tokens; holds back a possible beginning of one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = tuple(string for string in stop if string)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> tuple[str, bool]:
        """Add ``text``; returns the text to send, and whether a stop string was found.

        The stop string and everything after it are never sent.
        """
        if not self._stop:
            return text, False
        text = self._held + text
        starts = [(at, string) for at, string in ((text.find(string), string) for string in self._stop) if at >= 0]
        if starts:
            self._held = ""
            at, self.found = min(starts)
            return text[:at], True
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins a stop string."""
        longest = min(len(text), max(len(string) for string in self._stop) - 1)
        for length in range(longest, 0, -1):
            if any(string.startswith(text[-length:]) for string in self._stop):
                return length
        return 0
