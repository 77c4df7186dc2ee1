"""The position of an answer in a grammar."""

from __future__ import annotations

import pytest

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

import xgrammar

from bigmodel.server.engine.sampling.grammar_state import GrammarState
from tests.server.grammars import END, VOCABULARY
from tests.server.tiny import tiny_tokenizer


def state_of(text: str, stops: tuple[int, ...] = (END,)) -> GrammarState:
    info = xgrammar.TokenizerInfo.from_huggingface(
        tiny_tokenizer(), vocab_size=VOCABULARY, stop_token_ids=list(stops) or None
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return GrammarState(compiler.compile_grammar(xgrammar.Grammar.from_ebnf(text)), VOCABULARY, stops)


@pytest.mark.parametrize("stops", [(END,), ()])
def test_an_answer_is_complete_where_only_its_end_can_follow(stops: tuple[int, ...]) -> None:
    state = state_of('root ::= "ab"', stops)
    for token, complete in zip(tiny_tokenizer().encode("ab"), (False, True), strict=True):
        assert state.advance(token)
        state.fill()
        assert state.complete is complete


def test_an_answer_that_may_go_on_is_not_complete() -> None:
    state = state_of("root ::= [0-9]+")
    assert state.advance(tiny_tokenizer().encode("1")[0])
    state.fill()
    assert not state.complete


def test_what_is_taken_back_was_not_there() -> None:
    state = state_of('root ::= "ab"')
    first, second = tiny_tokenizer().encode("ab")
    state.fill()
    before = state.bitmask.clone()
    assert state.advance(first)
    assert state.advance(second)
    state.go_back(2)
    state.fill()
    assert state.bitmask.equal(before)
    assert not state.advance(second)
