"""Grammars matched in the process of a test."""

from __future__ import annotations

from typing import Any

import torch

from bigmodel.server.engine.sampling.grammar import Grammar
from bigmodel.server.engine.sampling.grammar_state import GrammarState
from tests.server.tiny import tiny_tokenizer

VOCABULARY, END = 261, 260
"""Of the tiny tokenizer: its tokens, and the one that ends a text."""


class LocalState:
    """The position of an answer in a grammar, which is compiled here."""

    def __init__(self, grammar: Grammar) -> None:
        self._state = GrammarState(compiled(grammar), VOCABULARY, (END,))
        self._state.fill()

    @property
    def complete(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return self._state.complete

    @property
    def can_continue(self) -> bool:
        """Whether any token can come next."""
        return bool(self._state.bitmask.any())

    def advance(self, token: int) -> None:
        """Account for a token. Raises RuntimeError if it does not fit."""
        if not self._state.advance(token):
            raise RuntimeError(f"token {token} does not fit the grammar")
        self._state.fill()

    def mask(self, scores: torch.Tensor) -> None:
        """Set the scores of tokens that cannot come next to minus infinity."""
        import xgrammar

        xgrammar.apply_token_bitmask_inplace(scores[None], self._state.bitmask)


_compiled: dict[bytes, Any] = {}


def compiled(grammar: Grammar) -> Any:
    """xgrammar's grammar."""
    import xgrammar

    if grammar.text not in _compiled:
        info = xgrammar.TokenizerInfo.from_huggingface(tiny_tokenizer(), vocab_size=VOCABULARY, stop_token_ids=[END])
        assert not grammar.serialised
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        _compiled[grammar.text] = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(grammar.text.decode()))
    return _compiled[grammar.text]
