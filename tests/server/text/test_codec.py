"""Text to tokens and back, and the bytes of one token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import ServeError
from bigmodel.server.text.codec import TextCodec
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
