"""Long texts outside the server: the same tokens, and an end when nobody waits, or where they take too much."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bigmodel.server.text import long_texts
from bigmodel.server.text.codec import TextCodec, TooManyTokensError
from bigmodel.server.text.long_texts import EncodeError, EncoderGoneError
from tests.server.tiny import fresh_tokenizer, tiny_tokenizer

WORDS = ["a", "b", "ab", "the", "\u2581the", "\u2581", "\u00e9", "th", "he", "##he", "##b", "##a"]


def unigram() -> Any:
    scores = [("<unk>", -20.0), *((word, -1 / (3 + index)) for index, word in enumerate(WORDS))]
    tokenizer = Tokenizer(models.Unigram(scores, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def unsplit() -> Any:
    pieces = ["<unk>", "a", "b", " ", "t", "h", "e", "ab", "th", "the", " the", "b a"]
    merges = [("a", "b"), ("t", "h"), ("th", "e"), (" ", "the")]
    return Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, unk_token="<unk>"))


def word_piece() -> Any:
    vocabulary = {piece: index for index, piece in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=1 << 20))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


@cache
def codec_of(kind: str) -> TextCodec:
    if kind == "bytes":
        return TextCodec(fresh_tokenizer())
    made = {"unigram": unigram, "unsplit": unsplit, "words": word_piece}[kind]()
    names = ["input_ids", "token_type_ids"] if kind == "words" else ["input_ids"]
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", model_input_names=names))


KINDS = ["bytes", "unigram", "unsplit", "words"]


@pytest.fixture(scope="module", autouse=True)
def small_processes() -> Iterator[None]:
    """The processes are of a new interpreter, as a server's are: it starts and forks faster than a preloaded one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bigmodel.server.forked.sys", sys)
        yield
    for kind in KINDS:
        codec_of(kind).close()


@pytest.fixture
def gone() -> Iterator[Future[None]]:
    """Somebody waits until this is done, and all texts are long."""
    future: Future[None] = Future()
    before = long_texts.left.set(future)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_texts, "LONG", 0)
        yield future
    long_texts.left.reset(before)


def outside(codec: TextCodec, *texts: str, special: bool = True) -> list[int]:
    """Tokens made outside, for certain."""
    found = codec._outside(texts, ("ids",), special=special)
    assert found is not None
    return found[0]


parts = ["a", "b", "t", "h", "e", " ", "\u00e9", "e\u0301", "\U0001f600", "</s>", "<|end|>", "\n"]
letters = st.lists(st.sampled_from(parts)).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_server_itself(kind: str) -> None:
    codec = codec_of(kind)

    @given(letters, letters, st.booleans(), st.integers(0, 20))
    def same(first: str, second: str, special: bool, longest: int) -> None:
        def all_of_it() -> list[Any]:
            found: list[Any] = [codec.encode(first, add_special_tokens=special)]
            found += [codec.encode_pair(first, second), codec.shortened(first, longest)]
            try:
                found.append(codec.encode(first, add_special_tokens=special, longest=longest))
            except TooManyTokensError as error:
                found.append(error.least)
            return found

        expected = all_of_it()
        before = long_texts.left.set(Future())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(long_texts, "LONG", 0)
            assert all_of_it() == expected
        long_texts.left.reset(before)

    same()
    assert codec._long._process is not None


def test_a_text_that_is_cut_is_cut_outside_too(gone: Future[None]) -> None:
    with pytest.raises(TooManyTokensError) as caught:
        codec_of("bytes").encode("a" * 10_000, longest=10)
    assert caught.value.least == 11
    assert codec_of("bytes").encode("a" * 10_000, longest=10_000) == [64] * 10_000


@pytest.mark.parametrize("pattern", [None, "split"])
def test_special_tokens_are_split_where_the_tokenizer_says_so(gone: Future[None], pattern: str | None) -> None:
    tokenizer = fresh_tokenizer()
    tokenizer.split_special_tokens = pattern == "split"
    codec = TextCodec(tokenizer)
    tokens = outside(codec, f"a{tokenizer.eos_token}")
    codec.close()
    assert tokens == tokenizer.encode(f"a{tokenizer.eos_token}")
    assert (tokenizer.eos_token_id in tokens) == (pattern is None)


def test_the_scores_of_a_unigram_model_are_not_rounded() -> None:
    scores = [(f"{index}", -15 / (7 + index)) for index in range(1000)]
    text = Tokenizer(models.Unigram(scores, 0)).to_str()
    assert Tokenizer.from_str(text).to_str() != text
    assert long_texts._loaded(text).to_str() == text


SLOW = "a" * 20_000
"""A word of which the tokenizer of words makes tokens for minutes."""


def children(codec: TextCodec) -> list[psutil.Process]:
    """Processes that tokenise for a codec."""
    process = codec._long._process
    assert process is not None
    return psutil.Process(process.pid).children()


def wait_for_children(codec: TextCodec, running: bool) -> None:
    end = time.monotonic() + 60
    while bool(children(codec)) != running:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_nothing_is_tokenised_for_nobody(gone: Future[None]) -> None:
    codec = codec_of("words")
    outside(codec, "a b")
    leaving = _Then(lambda: wait_for_children(codec, running=True), lambda: gone.set_result(None))
    with leaving, pytest.raises(EncodeError, match="nobody waits"):
        outside(codec, SLOW)
    wait_for_children(codec, running=False)
    with pytest.raises(EncodeError, match="nobody waits"):
        outside(codec, SLOW)
    wait_for_children(codec, running=False)


class _Then:
    """Runs functions in a thread, one after the other, within its context."""

    def __init__(self, *functions: Any) -> None:
        self._thread = threading.Thread(target=lambda: [function() for function in functions])

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_time_has_a_limit_and_the_next_text_none_of_it(gone: Future[None], monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_of("words")
    expected = outside(codec, "a b")
    monkeypatch.setattr(long_texts, "SECONDS", 0.05)
    with pytest.raises(EncodeError, match="too much time or memory"):
        outside(codec, SLOW)
    monkeypatch.undo()
    monkeypatch.setattr(long_texts, "LONG", 0)
    assert outside(codec, "a b") == expected


@pytest.fixture(scope="module")
def growing() -> Iterator[TextCodec]:
    """One that makes a megabyte of each "#", and that does not go on at a "?"."""
    tokenizer = unsplit()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("#", "a" * (1 << 20)), normalizers.Replace(Regex(r"(\?|\?\?)+!"), "")]
    )
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    yield codec
    codec.close()


@pytest.mark.slow
def test_memory_has_a_limit(growing: TextCodec, gone: Future[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "MEMORY_BYTES", 64 << 20)
    with pytest.raises(EncodeError, match="too much time or memory"):
        outside(growing, "#" * 1000)
    assert outside(growing, "ab") == [7]


def test_a_failure_of_the_tokenizer_is_told(growing: TextCodec, gone: Future[None]) -> None:
    with pytest.raises(EncodeError, match="the tokenizer failed: PanicException: Onig"):
        outside(growing, "?" * 100)


def test_the_process_is_started_again_where_it_was_ended(gone: Future[None]) -> None:
    codec = codec_of("bytes")
    expected = outside(codec, "a")
    process = codec._long._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert outside(codec, "a") == expected


def test_the_next_text_does_not_wait_for_one_that_outlives_the_process(
    gone: Future[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_texts, "SECONDS", 30.0)
    codec = codec_of("words")
    expected = outside(codec, "a b")
    process = codec._long._process
    assert process is not None
    wait_for_children(codec, running=False)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(copy_context().run, outside, codec, SLOW)
        wait_for_children(codec, running=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        found = outside(codec, "a b")
        assert not slow.done()
        gone.set_result(None)
        assert "nobody waits" in str(slow.exception(60))
    assert found == expected


def test_a_process_that_cannot_be_started_is_no_fault_of_the_text(
    gone: Future[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    codec = TextCodec(codec_of("words").tokenizer)
    with monkeypatch.context() as patch, pytest.raises(EncoderGoneError, match="does not start; try again"):
        patch.setattr("subprocess.Popen", fails)
        outside(codec, "a b")
    assert codec._long._control is None


def test_it_ends_with_what_is_tokenised(gone: Future[None]) -> None:
    codec = TextCodec(codec_of("words").tokenizer)
    outside(codec, "a b")
    process = codec._long._process
    assert process is not None
    found: list[psutil.Process] = []

    def end() -> None:
        wait_for_children(codec, running=True)
        found.extend(children(codec))
        codec._long._control.close()  # type: ignore[union-attr]  # as when the server has ended
        process.wait(60)
        gone.set_result(None)  # its sockets are closed, too

    with _Then(end), pytest.raises(EncodeError):
        outside(codec, SLOW)
    end_of_wait = time.monotonic() + 60
    while any(map(is_running, found)):
        assert time.monotonic() < end_of_wait
        time.sleep(0.01)
    codec.close()


def is_running(process: psutil.Process) -> bool:
    """Whether a process computes; one that ended may stay in the list for want of a parent that asks for it."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


class InPython(PreTrainedTokenizerFast):
    def _encode_plus(self, text: Any, *args: Any, **options: Any) -> Any:
        return super()._encode_plus(text.upper(), *args, **options)


class OwnSplit:
    def pre_tokenize(self, text: Any) -> None:
        text.split(lambda number, part: [part])


def split_in_python() -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=unsplit())
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(OwnSplit())
    return tokenizer


def test_what_is_written_in_python_stays_in_its_thread(gone: Future[None]) -> None:
    for tokenizer in (InPython(tokenizer_object=unsplit()), split_in_python()):
        codec = TextCodec(tokenizer)
        assert codec._outside(("ab",), ("ids",), special=True) is None
        assert codec._long._process is None
        assert codec.encode("ab") == tokenizer.encode("ab")


def test_short_texts_and_texts_that_somebody_waits_for_stay_in_their_thread() -> None:
    codec = TextCodec(tiny_tokenizer())
    assert codec._outside(("a" * long_texts.LONG,), ("ids",), special=True) is None
    before = long_texts.left.set(Future())
    assert codec._outside(("a" * (long_texts.LONG - 1),), ("ids",), special=True) is None
    long_texts.left.reset(before)
    assert codec._long._process is None
