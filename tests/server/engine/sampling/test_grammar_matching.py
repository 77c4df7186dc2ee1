"""A sequence is matched with its grammar by a process of its own, as it would be here, and within limits."""

from __future__ import annotations

import atexit
import random
import select
import sys
import time
from collections.abc import Iterator
from functools import cache, partialmethod
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

from bigmodel.server.engine.sampling.expressions import json_text
from bigmodel.server.engine.sampling.grammar import GrammarCompiler
from bigmodel.server.engine.sampling.grammar_matching import MatchedSequence, MatchError, wait_for
from bigmodel.server.engine.sampling.grammar_worker import GrammarWorker
from tests.server.grammars import END, VOCABULARY, LocalState
from tests.server.tiny import tiny_tokenizer

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": ["cat", 5]}}}}
COSTLY = "^([b-z]{3}|a((" + "".join(f"{letter}?" for letter in "abcdefghijklmnopqrstuvwxyz") + "){0,30}){0,900})$"


@cache
def compiler() -> GrammarCompiler:
    made = GrammarCompiler(tiny_tokenizer(), VOCABULARY, (END,))
    atexit.register(made.close)
    return made


@pytest.fixture
def own() -> Iterator[GrammarCompiler]:
    """A compiler whose worker is a process of its own interpreter, not forked from a preloaded one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bigmodel.server.forked.sys", sys)
        made = GrammarCompiler(tiny_tokenizer(), VOCABULARY, (END,))
        yield made
        made.close()


def begun(schema: dict[str, Any], by: GrammarCompiler | None = None) -> MatchedSequence:
    state = (by or compiler()).compile(json_text(schema)).state()
    state.begin()
    return state


def forking(made: GrammarCompiler) -> psutil.Process:
    """What forks a process for each sequence."""
    worker = made._worker._process
    assert worker is not None
    (found,) = psutil.Process(worker.pid).children()
    return found


def scores_of(state: MatchedSequence | LocalState) -> list[float]:
    scores = torch.zeros(VOCABULARY)
    if isinstance(state, MatchedSequence):
        while not state.ready:
            wait_for([state], 1.0)
    state.mask(scores)
    return scores.tolist()


def walk(schema: dict[str, Any], seed: int = 1) -> list[int]:
    """Tokens of an answer, or the beginning of one."""
    state, rng, found = LocalState(compiler().compile(json_text(schema))), random.Random(seed), []
    while not state.complete and len(found) < 40:
        allowed = [token for token, score in enumerate(scores_of(state)) if score == 0 and token != END]
        found.append(rng.choice(allowed))
        state.advance(found[-1])
    return found


def test_masks_are_those_of_the_grammar() -> None:
    state, here = begun(SCHEMA), LocalState(compiler().compile(json_text(SCHEMA)))
    for token in walk(SCHEMA):
        assert scores_of(state) == scores_of(here)
        state.advance(token)
        here.advance(token)
        while not state.ready:
            wait_for([state], 1.0)
        assert state.complete == here.complete
    state.close()


@pytest.mark.parametrize("right", [0, 2, 3])
def test_masks_of_a_draft_are_those_without_one(right: int) -> None:
    tokens = walk(SCHEMA)
    draft = [*tokens[:right], *tiny_tokenizer().encode("zzz")][:3]
    state, here = begun(SCHEMA), LocalState(compiler().compile(json_text(SCHEMA)))
    state.propose(draft)
    for token in tokens[:8]:
        assert scores_of(state) == scores_of(here)
        state.advance(token)
        here.advance(token)
    assert scores_of(state) == scores_of(here)
    state.close()


def test_a_token_that_does_not_fit_fails_the_sequence() -> None:
    state = begun(SCHEMA)
    scores_of(state)
    state.advance(tiny_tokenizer().encode("x")[0])
    with pytest.raises(MatchError, match="choosing a token of the answer failed"):
        scores_of(state)


def test_a_mask_that_takes_too_long_fails_its_sequence_and_no_other() -> None:
    costly, fine = begun({"type": "string", "pattern": COSTLY}), begun(SCHEMA)
    with pytest.raises(MatchError, match="takes too much time or memory; describe less of it"):
        for token in tiny_tokenizer().encode('"' + "a" * 60):
            scores_of(costly)
            costly.advance(token)
    assert not costly.complete
    assert scores_of(fine) == scores_of(LocalState(compiler().compile(json_text(SCHEMA))))
    fine.close()


@pytest.mark.long
@pytest.mark.slow
def test_the_process_of_a_sequence_ends_with_it(own: GrammarCompiler) -> None:
    state = begun(SCHEMA, own)
    scores_of(state)
    (process,) = forking(own).children()
    state.close()
    process.wait(60)


LARGE: dict[str, Any] = {"enum": [f"{number}-{number * 7919 % 99991}" for number in range(3000)]}
LARGE_BYTES = 4 << 20
"""Fewer bytes than a process takes for it."""


@pytest.mark.slow
def test_the_largest_processes_end_where_all_of_them_take_too_much_together() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarWorker, "__init__", partialmethod(GrammarWorker.__init__, together=LARGE_BYTES))
        made = GrammarCompiler(tiny_tokenizer(), VOCABULARY, (END,))
    small, large = begun(SCHEMA, made), begun(LARGE, made)
    wait_for([large], 60.0)  # its process has ended, or its mask has come
    process_ends(large)
    with pytest.raises(MatchError, match="takes too much time or memory; describe less of it"):
        while True:
            scores_of(large)
            large.advance(tiny_tokenizer().encode('"')[0])
    here = LocalState(made.compile(json_text(SCHEMA)))
    for token in walk(SCHEMA)[:3]:
        assert scores_of(small) == scores_of(here)
        small.advance(token)
        here.advance(token)
    again = begun({**SCHEMA, "title": "again"}, made)
    assert scores_of(again) == scores_of(LocalState(made.compile(json_text(SCHEMA))))
    made.close()


def process_ends(state: MatchedSequence) -> None:
    """Wait until the process of a sequence has closed its end of the socket."""
    poll = select.poll()
    poll.register(state.fileno(), 0)
    assert poll.poll(60_000), "it goes on"


@pytest.mark.long
@pytest.mark.slow
def test_what_forks_the_processes_is_started_again_for_a_grammar_that_is_kept(own: GrammarCompiler) -> None:
    state, grammar = begun(SCHEMA, own), own.compile(json_text(SCHEMA))
    expected = scores_of(state)
    forking(own).kill()
    while own._worker.runs:
        time.sleep(0.01)
    gone = grammar.state()
    gone.begin()
    with pytest.raises(MatchError, match="try again"):
        scores_of(gone)
    assert own.kept(json_text(SCHEMA)) is None
    again = begun(SCHEMA, own)
    assert scores_of(again) == expected
    state.advance(tiny_tokenizer().encode("{")[0])  # what runs goes on
    assert scores_of(state) != expected
    for each in (state, again):
        each.close()
