"""Constrained decoding: outputs that match a JSON schema, by masking tokens that cannot lead to a match.

xgrammar compiles the grammars, in a worker process, and matches them in the engine (``pip install bigmodel[json]``).
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable
from typing import Any

import torch

from bigmodel.errors import ServeError
from bigmodel.server.engine.sampling.expressions import Expression, schemas_in, written_size
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
        self._info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary_size, stop_token_ids=stops or None
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._vocabulary_size = vocabulary_size
        self._stops = tuple(stops)
        self._worker = GrammarWorker(self._info.serialize_json(), bool(stops))
        self._kept = Kept[tuple[Grammar, int] | str](_ONCE_BYTES, _AGAIN_BYTES, grammar_size)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the compiled grammars that are kept."""
        return self._kept.nbytes

    def compile(self, expression: Expression) -> Grammar:
        """Return the grammar of an answer.

        Objects and arrays have no members beyond those of their schema, unless it allows them explicitly.

        Raises:
            GrammarError: a schema cannot be enforced, or the grammar takes too much to compile.
        """
        return self.kept(expression) or _usable(self._compiled(json.dumps(expression)))

    def kept(self, expression: Expression) -> Grammar | None:
        """Return the grammar of an answer if it is kept, None if it would have to be compiled. Takes little time.

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
        known = self._kept.get(json.dumps(expression))
        return None if known is None else _usable(known)

    def close(self) -> None:
        """End the worker process."""
        self._worker.close()

    def _compiled(self, text: str) -> tuple[Grammar, int] | str:
        """Compile an expression and keep the grammar, or what is wrong with it."""
        import xgrammar

        found: tuple[Grammar, int] | str
        try:
            ready = self._worker.compile(text)
            if ready.serialised:
                compiled = xgrammar.CompiledGrammar.deserialize_json(ready.text, self._info)
            else:
                compiled = self._compiler.compile_grammar(xgrammar.Grammar.from_ebnf(ready.text))
            found = Grammar(compiled, self._vocabulary_size, self._stops), compiled.memory_size_bytes
        except WorkerEndedError as error:
            return str(error)
        except CompileError as error:
            found = str(error)
        self._kept.put(text, found)
        return found


def _usable(found: tuple[Grammar, int] | str) -> Grammar:
    if isinstance(found, str):
        raise GrammarError(f"the schema cannot be enforced: {found}")
    return found[0]


def grammar_size(kept: tuple[Grammar, int] | str) -> int:
    return len(kept) if isinstance(kept, str) else kept[1]


class Grammar:
    """A compiled grammar, shared by the sequences of a request."""

    def __init__(self, compiled: Any, vocabulary_size: int, stop_ids: tuple[int, ...]) -> None:
        self._compiled = compiled
        self._vocabulary_size = vocabulary_size
        self._stop_ids = stop_ids

    def state(self) -> GrammarState:
        """A new state, for one sequence."""
        return GrammarState(self._compiled, self._vocabulary_size, self._stop_ids)


class GrammarState:
    """The position of one sequence in its grammar."""

    def __init__(self, compiled: Any, vocabulary_size: int, stop_ids: tuple[int, ...]) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        self._matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not stop_ids)
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocabulary_size)
        self._stops = torch.zeros_like(self._bitmask)
        for token in stop_ids:
            self._stops[0, token // 32] |= _bit(token % 32)

    @property
    def complete(self) -> bool:
        """Whether the output is complete and nothing can follow."""
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        # A number may continue after it is valid: complete is only what end tokens alone can follow.
        self._matcher.fill_next_token_bitmask(self._bitmask)
        return not bool((self._bitmask & ~self._stops).any())

    @property
    def can_continue(self) -> bool:
        """Whether any token can come next."""
        self._matcher.fill_next_token_bitmask(self._bitmask)
        return bool(self._bitmask.any())

    def mask(self, scores: torch.Tensor) -> None:
        """Set the scores [vocabulary] of tokens that cannot come next to minus infinity, in place.

        Raises :class:`GrammarError` when none can.
        """
        if not self.can_continue:
            raise GrammarError(
                "no token can go on with the answer's format; does a token that ends a text belong to it?"
            )
        self._xgrammar.apply_token_bitmask_inplace(scores[None], self._bitmask.to(scores.device))

    def advance(self, token_id: int) -> None:
        """Account for a chosen token."""
        if not self._matcher.accept_token(token_id):
            raise RuntimeError(f"token {token_id} does not fit the grammar")


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


def _bit(position: int) -> int:
    """Bit ``position`` of a signed 32-bit word."""
    return 1 << position if position < 31 else -(1 << 31)
