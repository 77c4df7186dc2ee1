"""Reasoning is asked for as far as the chat template has words for it."""

from __future__ import annotations

import pytest

from bigmodel.server.answers.parsers.formats import AnswerFormat, ModelFormats
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.reasoning import reasoning_budget, reasoning_variables
from bigmodel.server.text.codec import TextCodec
from tests.server.tiny import fresh_tokenizer

QWEN = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ message['thinking'] }}"
HARMONY = "{{ reasoning_effort }} {{ message.thinking }} 'thinking'"


def codec_of(template: str) -> TextCodec:
    tokenizer = fresh_tokenizer()
    tokenizer.chat_template = template
    return TextCodec(tokenizer)


@pytest.mark.parametrize(
    ("template", "thinking", "effort", "found"),
    [
        (QWEN, False, None, {"enable_thinking": False}),
        (QWEN, True, None, {"enable_thinking": True}),
        (QWEN, None, None, {}),
        (QWEN, None, "none", {"enable_thinking": False}),
        (DEEPSEEK, True, None, {"thinking": True}),
        (HARMONY, True, "low", {"reasoning_effort": "low"}),
        (HARMONY, None, None, {}),
        ("", True, None, {}),
        ("", None, "medium", {}),
        (QWEN, False, "medium", {"enable_thinking": False}),
        (HARMONY, None, "medium", {"reasoning_effort": "medium"}),
    ],
)
def test_variables(template: str, thinking: bool | None, effort: str | None, found: dict[str, object]) -> None:
    assert reasoning_variables(codec_of(template), thinking, effort) == found


@pytest.mark.parametrize(("template", "effort"), [(QWEN, "low"), ("", "none"), ("", "high")])
def test_an_effort_that_means_nothing_to_the_template_is_refused(template: str, effort: str) -> None:
    with pytest.raises(APIError) as refused:
        reasoning_variables(codec_of(template), None, effort)
    assert (refused.value.status, refused.value.param) == (400, "reasoning_effort")


def test_another_interface_has_another_usual_effort() -> None:
    assert reasoning_variables(codec_of(""), None, "high", "high") == {}
    with pytest.raises(APIError):
        reasoning_variables(codec_of(""), None, "medium", "high")


def test_a_budget_is_of_reasoning_that_ends_with_a_tag() -> None:
    codec = codec_of("")
    made = reasoning_budget(5, AnswerFormat(ModelFormats(None, "think"), opened=True), codec)
    assert made is not None
    assert (made.tokens, made.tags, made.opened) == (5, ("<think>", "</think>"), True)
    assert reasoning_budget(5, AnswerFormat(ModelFormats(None, "think"), forced=True), codec) is not None
    for form in (None, AnswerFormat(ModelFormats()), AnswerFormat(ModelFormats(None, "think"), closed=True)):
        assert reasoning_budget(5, form, codec) is None
    with pytest.raises(APIError) as refused:
        reasoning_budget(5, AnswerFormat(ModelFormats(None, "harmony")), codec)
    assert refused.value.param == "thinking_token_budget"
