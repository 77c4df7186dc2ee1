"""Constrained decoding: outputs that match a JSON schema, by masking tokens that cannot lead to a match.

xgrammar compiles the grammars in a worker process, and others match answers with them (``pip install bigmodel[json]``).
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from bigmodel.errors import ServeError
from bigmodel.server.engine.sampling.expressions import Expression, schemas_in, written_size
from bigmodel.server.engine.sampling.grammar_matching import MatchedSequence
from bigmodel.server.engine.sampling.grammar_worker import CompileError, GrammarWorker, WorkerEndedError
from bigmodel.server.engine.sampling.kept import Kept

# Bounds of a schema: compile time grows with the square of each.
DEPTH = 64
_PARTS = 1000
_REPEATS = 1000
_VALUES = 100_000  # of the text in which schemas and what stands between them are sent to the worker
_NESTING = 300  # of that text
_ONCE_BYTES = 8 << 20  # of compiled grammars, kept for requests with the same schema
_AGAIN_BYTES = 32 << 20  # of those that another request has asked for

_REPETITION = re.compile(r"\{(\d+)(?:,(\d*))?\}")

ANY_OBJECT = {"type": "object", "additionalProperties": True}

# Keywords that xgrammar ignores. They are refused: an unenforced constraint would look enforced.
_UNENFORCED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "multipleOf"),
        *("dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    )
)
# Keywords whose members have names of the author's choice, not keywords.
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))


class GrammarError(ServeError, ValueError):
    """A schema cannot be enforced, or no token can continue the output."""


class GrammarGoneError(GrammarError):
    """The process that compiles schemas was ended from outside; the schema is not at fault."""


def available() -> bool:
    """Whether xgrammar is installed."""
    return importlib.util.find_spec("xgrammar") is not None


class GrammarCompiler:
    """Compiles schemas for one tokenizer in a worker process, and keeps what was compiled and refused. Thread-safe.

    Args:
        tokenizer: a transformers tokenizer.
        vocabulary_size: width of the model's logits.
        stop_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int, stop_ids: Iterable[int]) -> None:
        import xgrammar

        stops = sorted(stop_ids)
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary_size, stop_token_ids=stops or None
        )
        self._vocabulary_size = vocabulary_size
        self._worker = GrammarWorker(info.serialize_json(), stops)
        self._kept = Kept[Grammar | str](_ONCE_BYTES, _AGAIN_BYTES, grammar_size)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the grammars that are kept."""
        return self._kept.nbytes

    def compile(self, expression: Expression) -> Grammar:
        """Return the grammar of an answer.

        Objects and arrays have no members beyond those of their schema, unless it allows them explicitly.

        Raises:
            GrammarError: a schema cannot be enforced, or the grammar takes too much to compile.
            GrammarGoneError: the process that compiles was ended from outside.
        """
        found = self.kept(expression)
        if found is None:
            found = self._known(expression)
            if found is not None:
                self._start()
        return found or _usable(self._compiled(json.dumps(expression)))

    def kept(self, expression: Expression) -> Grammar | None:
        """Return the grammar of an answer if it is kept; None if it would have to be compiled, or the process that
        starts those that match answers is gone. Takes little time.

        Raises:
            GrammarError: as for :meth:`compile`, where that is known.
        """
        values, depth = written_size(expression)
        if values > _VALUES or depth > _NESTING:
            raise GrammarError(
                f"its format has more than {_VALUES} values or is nested more than {_NESTING} deep; "
                "give fewer functions, fewer optional arguments or fewer references"
            )
        schemas = list(schemas_in(expression))
        _refuse_too_large(schemas)
        for schema in schemas:
            _refuse_unenforced(schema, "schema")
        found = self._known(expression)
        return found if self._worker.runs else None

    def _known(self, expression: Expression) -> Grammar | None:
        known = self._kept.get(json.dumps(expression))
        return None if known is None else _usable(known)

    def _start(self) -> None:
        try:
            self._worker.start()
        except WorkerEndedError as error:
            raise _gone(error) from error
        except CompileError as error:
            raise GrammarError(f"the schema cannot be enforced: {error}") from error

    def close(self) -> None:
        """End the worker process."""
        self._worker.close()

    def _compiled(self, text: str) -> Grammar | str:
        """Compile an expression and keep the grammar, or what is wrong with it."""
        found: Grammar | str
        try:
            ready = self._worker.compile(text)
            found = Grammar(ready.text.encode(), ready.serialised, self._worker, self._vocabulary_size)
        except WorkerEndedError as error:
            raise _gone(error) from error
        except CompileError as error:
            found = str(error)
        self._kept.put(text, found)
        return found


def _gone(error: WorkerEndedError) -> GrammarGoneError:
    return GrammarGoneError(f"the schema cannot be enforced now: {error}")


def _usable(found: Grammar | str) -> Grammar:
    if isinstance(found, str):
        raise GrammarError(f"the schema cannot be enforced: {found}")
    return found


def grammar_size(kept: Grammar | str) -> int:
    return len(kept if isinstance(kept, str) else kept.text)


class Grammar:
    """A grammar that was compiled, shared by the sequences of a request.

    Args:
        text: it, as xgrammar serialises it, or its own text.
        serialised: which of both it is.
        worker: starts the processes that match answers with it.
        vocabulary_size: width of the model's logits.
    """

    def __init__(self, text: bytes, serialised: bool, worker: GrammarWorker, vocabulary_size: int) -> None:
        self.text = text
        self.serialised = serialised
        self._worker = worker
        self._vocabulary_size = vocabulary_size

    def state(self) -> MatchedSequence:
        """A new state, for one sequence."""
        return MatchedSequence(partial(self._worker.match, self.text, self.serialised), self._vocabulary_size)


def _refuse_too_large(schemas: list[Any]) -> None:
    """Raise :class:`GrammarError` for schemas whose compilation would take too long."""
    parts, level = 0, schemas
    for _ in range(DEPTH):
        parts += sum(isinstance(part, dict) for part in level)
        if parts > _PARTS:
            raise GrammarError(f"the schema has more than {_PARTS} parts; split it, or describe less of the answer")
        _refuse_repeats(part["pattern"] for part in level if isinstance(part, dict) and "pattern" in part)
        level = [inner for part in level for inner in _members(part)]
    if level:
        raise GrammarError(f"the schema is nested more than {DEPTH} deep; use $ref and $defs")


def _members(part: Any) -> Iterable[Any]:
    if isinstance(part, dict):
        return part.values()
    return part if isinstance(part, list) else ()


def _refuse_repeats(patterns: Iterable[Any]) -> None:
    for pattern in patterns:
        for least, most in _REPETITION.findall(pattern) if isinstance(pattern, str) else ():
            if max(int(least[:9]), int(most[:9] or 0)) > _REPEATS:
                raise GrammarError(f"the pattern {pattern[:80]!r} repeats a part more than {_REPEATS} times")


def _refuse_unenforced(schema: Any, place: str) -> None:
    """Raise :class:`GrammarError` for a part of ``schema`` that xgrammar would ignore."""
    if isinstance(schema, list):
        for index, part in enumerate(schema):
            _refuse_unenforced(part, f"{place}[{index}]")
    if not isinstance(schema, dict):
        return
    for keyword in sorted(_UNENFORCED & schema.keys()):
        raise GrammarError(f"{place}: '{keyword}' is not supported")
    if isinstance(schema.get("$ref"), str) and not schema["$ref"].startswith("#"):
        raise GrammarError(f"{place}: '$ref' to another document is not supported")
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength"}:
        raise GrammarError(f"{place}: 'pattern' together with a length is not supported; put it in the pattern")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise GrammarError(f"{place}: 'allOf' of several schemas is not supported")
    for key, part in schema.items():
        if key in _NAMED and isinstance(part, dict):
            for name, inner in part.items():
                _refuse_unenforced(inner, f"{place}.{key}.{name}")
        elif key not in ("enum", "const", "default", "examples", "required"):
            _refuse_unenforced(part, f"{place}.{key}")
