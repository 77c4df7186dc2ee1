"""Text to tokens and back, whole and piece by piece, and the bytes of one token."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import ServeError
from bigmodel.server.text.codec import (
    Detokenizer,
    StopChecker,
    TemplateTimeError,
    TextCodec,
    _TimeLimits,
)
from tests.preloaded import run as run_program
from tests.server.tiny import EOS, spaced_tokenizer, tiny_tokenizer

codec = TextCodec(tiny_tokenizer())


@given(st.text())
def test_any_text_is_equal_after_encoding_and_decoding(text: str) -> None:
    assert codec.decode(codec.encode(text), skip_special_tokens=False) == text


@given(st.text())
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str) -> None:
    assert b"".join(codec.token_bytes(token) for token in codec.encode(text)) == text.encode()


def test_special_tokens_read_as_they_are_written() -> None:
    assert codec.token_text(tiny_tokenizer().eos_token_id) == EOS
    assert codec.token_bytes(tiny_tokenizer().eos_token_id) == EOS.encode()
    assert codec.decode([tiny_tokenizer().eos_token_id]) == ""


def test_byte_fallback_tokens_are_their_byte() -> None:
    class Tokenizer:
        all_special_ids: list[int] = []
        backend_tokenizer = None

        def __len__(self) -> int:
            return 1

        def convert_ids_to_tokens(self, token: int) -> str:
            return "<0xE2>"

    assert TextCodec(Tokenizer()).token_bytes(0) == b"\xe2"


def test_chats_are_rendered_by_the_template() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert codec.render_chat(messages) == "<system>a\n<user>b\n<assistant>"
    assert codec.render_chat(messages, add_generation_prompt=False) == "<system>a\n<user>b\n"
    assert codec.render_chat(messages, tools=[{"type": "function"}]).startswith("[tools: 1]")


def test_a_tokenizer_without_a_template_uses_a_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", None)
    assert codec.render_chat([{"role": "user", "content": "b"}]) == "user: b\nassistant:"


def test_a_token_reads_as_it_does_within_a_text() -> None:
    spaced = TextCodec(spaced_tokenizer())
    for word, text in (
        ("\u2581the", " the"),
        ("\u2581", " "),
        ("s", "s"),
        ("<0x41>", "A"),
        ("<0xE2>", "\ufffd"),
        (EOS, EOS),
    ):
        token = spaced.tokenizer.convert_tokens_to_ids(word)
        assert spaced.token_text(token) == text
    assert spaced.token_bytes(spaced.tokenizer.convert_tokens_to_ids("\u2581the")) == b" the"


def test_the_tool_template_is_used_for_chats_with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    templates = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", templates)
    message = {"role": "user", "content": "b"}
    assert codec.render_chat([message]) == "plain"
    assert codec.render_chat([message], tools=[{"type": "function"}]) == "1 tools"


def test_tools_are_refused_if_the_template_ignores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", None)
    with pytest.raises(ServeError, match="no place for tools"):
        codec.render_chat([{"role": "user", "content": "b"}], tools=[{"type": "function"}])


def test_an_error_of_the_template_is_a_serve_error() -> None:
    with pytest.raises(ServeError, match="template refused"):
        codec.render_chat([{"role": "user", "content": "b"}], extra={"messages": 5})


ENDLESS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)


TRACED_AFTERWARDS = """
import sys
from bigmodel.server.text.codec import TemplateTimeError, _TimeLimits
try:
    _TimeLimits().ended_after(0.05, lambda: [None for _ in iter(int, 1)])
except TemplateTimeError:
    sys.setprofile(lambda *_: None)
    (lambda: None)()
    sys.setprofile(None)
    print("goes on")
"""


def test_a_process_can_be_traced_after_a_template_was_ended() -> None:
    """An exception that was taken back would have CPython look for it for ever, here in an endless loop."""
    assert run_program(["-c", TRACED_AFTERWARDS], timeout=60).stdout == "goes on\n"


def test_a_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.server.text.codec._templates", _TimeLimits())
    monkeypatch.setattr("bigmodel.server.text.codec.TEMPLATE_SECONDS", 0.05)
    message = {"role": "user", "content": "b"}
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", ENDLESS)
    for _ in range(2):
        with pytest.raises(TemplateTimeError, match="the model's chat template did not end within"):
            codec.render_chat([message])
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", None)
    assert codec.render_chat([message]) == "user: b\nassistant:"


def test_only_what_is_too_slow_is_ended() -> None:
    limits = _TimeLimits()

    def unless_ended() -> str:
        try:
            while True:
                time.sleep(0.001)
        except BaseException:
            return "not ended"

    with ThreadPoolExecutor(3) as threads:
        endless = [threads.submit(limits.ended_after, 0.05, lambda: [None for _ in iter(int, 1)]) for _ in range(2)]
        assert [limits.ended_after(60, number.bit_length) for number in range(9)] == [0, 1, 2, 2, 3, 3, 3, 3, 4]
        assert all(isinstance(each.exception(60), TemplateTimeError) for each in endless)
        assert limits.ended_after(0.05, unless_ended) == "not ended"  # and nothing is raised in the thread afterwards
        with pytest.raises(ZeroDivisionError):
            limits.ended_after(60, lambda: 1 // 0)
    assert limits._calls == {}


def clock(monkeypatch: pytest.MonkeyPatch, monotonic: Callable[[], float]) -> None:
    """Have limits read another clock, and sleep briefly."""
    brief = SimpleNamespace(monotonic=monotonic, sleep=lambda seconds: time.sleep(seconds / 1000))
    monkeypatch.setattr("bigmodel.server.text.codec.time", brief)


def test_a_limit_that_is_passed_while_it_is_looked_at_ends_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, itertools.count(1.0).__next__)  # a second passes from one look to the next
    limits = _TimeLimits()
    with pytest.raises(TemplateTimeError):
        limits.ended_after(1.5, lambda: [None for _ in iter(limits._is_watched, False)])


def test_a_limit_does_not_end_the_next_call_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, caller = _TimeLimits(), threading.get_ident()
    looks = itertools.count()
    looking, begun, again = threading.Event(), threading.Event(), threading.Event()

    def monotonic() -> float:
        if threading.get_ident() == caller:
            return 0.0
        if next(looks) == 0:
            looking.set()
            begun.wait(60)
            return 61.0  # the first call has just ended
        again.set()
        return 0.0

    def second() -> str:
        begun.set()
        while not again.is_set():
            time.sleep(0.001)
        return "whole"

    clock(monkeypatch, monotonic)
    assert limits.ended_after(60, lambda: looking.wait(60))
    assert limits.ended_after(60, second) == "whole"


def test_a_call_that_cannot_be_watched_leaves_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("can't start new thread")

    limits = _TimeLimits()
    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(RuntimeError):
        limits.ended_after(60, int)
    assert limits._calls == {}


def pieces(ids: list[int], prompt: list[int] | None = None, codec: TextCodec = codec) -> list[str]:
    detokenizer = Detokenizer(codec, prompt or [])
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_text_arrives_in_whole_characters(text: str) -> None:
    parts = pieces(codec.encode(text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(0, 259), max_size=60))
def test_any_tokens_add_up_to_their_text(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == codec.decode(ids)


def test_a_character_is_held_back_until_it_is_whole() -> None:
    euro = codec.encode("€")
    assert len(euro) == 3
    assert pieces(euro) == ["", "", "€", ""]
    assert pieces(euro[:2]) == ["", "", "\ufffd"]


def test_invalid_bytes_do_not_hold_text_back() -> None:
    continuation = codec.encode("€")[1:2]
    parts = pieces(continuation * 100)
    assert max(len(part) for part in parts) == 1
    assert "".join(parts) == codec.decode(continuation * 100)


@pytest.mark.slow
@given(st.lists(st.sampled_from([94, 125, 126, 127, 200, 230, 33]), min_size=40, max_size=120))
def test_long_runs_of_broken_bytes_add_up_too(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == codec.decode(ids)


@given(st.text(), st.lists(st.integers(0, 259), max_size=20))
def test_text_after_a_prompt_adds_up_too(prompt: str, ids: list[int]) -> None:
    before = codec.encode(prompt)
    assert prompt + "".join(pieces(ids, before)) == codec.decode(before + ids)


def test_an_incomplete_character_at_the_end_of_a_prompt_is_unchanged() -> None:
    first, *others = codec.encode("€")
    assert "".join(pieces([*others, *codec.encode("s")], [first])) == codec.decode(others) + "s"


def test_the_space_before_the_first_word_is_kept_in_continued_texts() -> None:
    spaced = TextCodec(spaced_tokenizer())
    the, cat, s = (spaced.tokenizer.convert_tokens_to_ids(word) for word in ("\u2581the", "\u2581cat", "s"))
    bytes_of_a_euro = [spaced.tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert pieces([cat, s], [the], spaced) == [" cat", "s", ""]
    assert pieces([cat, s], [the, *bytes_of_a_euro], spaced) == [" cat", "s", ""]
    assert pieces([cat, s], [spaced.tokenizer.eos_token_id], spaced) == ["cat", "s", ""]


def test_special_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(codec)
    eos = tiny_tokenizer().eos_token_id
    assert [detokenizer.add(eos) for _ in range(50)] == [""] * 50
    assert detokenizer.add(codec.encode("a")[0]) == "a"


letters = st.text(alphabet="ab", max_size=4)


def run(stop: tuple[str, ...], parts: list[str]) -> tuple[str, bool]:
    """What is shown in all, and whether a stop string was met."""
    checker = StopChecker(stop)
    shown = ""
    for part in parts:
        text, stopped = checker.push(part)
        shown += text
        if stopped:
            return shown, True
    return shown + checker.flush(), False


@given(st.lists(letters.filter(bool), min_size=1, max_size=3), st.lists(letters, max_size=12))
def test_the_text_ends_before_the_first_completed_stop_string(stops: list[str], parts: list[str]) -> None:
    """The text so far is searched after each part; what is shown never reaches into a stop string."""
    expected, stopped = "".join(parts), False
    for count in range(1, len(parts) + 1):
        so_far = "".join(parts[:count])
        starts = [so_far.find(stop) for stop in stops if stop in so_far]
        if starts:
            expected, stopped = so_far[: min(starts)], True
            break
    assert run(tuple(stops), parts) == (expected, stopped)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    checker = StopChecker(("END",))
    assert checker.push("the E") == ("the ", False)
    assert checker.push("N") == ("", False)
    assert checker.push("T") == ("ENT", False)
    assert checker.push(" END of") == (" ", True)


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopChecker(()).push("anything") == ("anything", False)


def test_special_tokens_have_no_text_but_those_that_are_kept() -> None:
    end = tiny_tokenizer().eos_token_id
    assert codec.special_texts == {EOS: end}
    tokens = [*codec.encode("a"), end, *codec.encode("€")[:2], end, *codec.encode("b")]
    for kept, text in (({}, "a\ufffdb"), ({end: EOS}, f"a{EOS}\ufffd{EOS}b")):
        detokenizer = Detokenizer(codec, kept=kept)
        assert "".join(detokenizer.add(token) for token in tokens) + detokenizer.flush() == text


@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_a_shortened_text_has_so_many_tokens_and_is_a_beginning(count: int) -> None:
    codec = TextCodec(tiny_tokenizer())
    for text in ("in the then " * 500, "ö" * 900, "a"):
        short = codec.shortened(text, count)
        whole = codec.encode(text)
        assert text.startswith(short)
        assert len(codec.encode(short)) <= count
        if len(whole) > count + 2:
            assert codec.encode(short)[: count - 2] == whole[: max(0, count - 2)] if count > 2 else True


def test_a_far_longer_text_is_not_tokenised_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, sizes = TextCodec(tiny_tokenizer()), []
    whole = codec.tokenizer.__class__.__call__
    monkeypatch.setattr(
        codec.tokenizer.__class__,
        "__call__",
        lambda self, text, *args, **more: sizes.append(len(text)) or whole(self, text, *args, **more),
    )
    assert codec.encode(codec.shortened("in the " * 100_000, 4)) == codec.encode("in the in")
    assert max(sizes) < 10_000


def test_pairs_have_the_tokens_of_both() -> None:
    codec = TextCodec(tiny_tokenizer())
    tokens, _ = codec.encode_pair("the", "in")
    assert tokens == codec.encode("the") + codec.encode("in")
    assert codec.encode_pair("the")[0] == codec.encode("the")


def test_names_of_tokens() -> None:
    codec = TextCodec(tiny_tokenizer())
    assert codec.pieces(codec.encode("in the")) == ["in", "Ġthe"]


def test_the_stop_string_that_was_found_is_known() -> None:
    checker = StopChecker(("end", "x"))
    assert checker.found is None
    checker.push("ax")
    assert checker.found == "x"
