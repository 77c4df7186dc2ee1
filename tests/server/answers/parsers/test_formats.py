"""Formats are recognised by the chat template, and no text is lost or changed by how it arrives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from bigmodel.errors import ServeError
from bigmodel.server.answers.parsers.formats import (
    REASONING_TAGS,
    TOOL_FORMATS,
    AnswerFormat,
    ModelFormats,
    check_names,
    formats_of,
)
from bigmodel.server.text.codec import TextCodec
from tests.server.answers.parsers.reading import SCHEMAS, Answer, form, read, read_pieces, special
from tests.server.tiny import fresh_tokenizer

LOOP = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ tools }}"


def codec_of(template: Any, *special_tokens: str) -> TextCodec:
    tokenizer = fresh_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special_tokens], special_tokens=True)
    tokenizer.chat_template = template
    return TextCodec(tokenizer)


@pytest.mark.parametrize(
    ("template", "special_tokens", "tools", "reasoning"),
    [
        (LOOP, (), None, None),
        (LOOP + "<|python_tag|>", (), "llama3", None),
        (LOOP + "Environment: ipython", ("<|python_tag|>",), "llama3", None),
        (LOOP + "<tool_call>", (), "hermes", None),
        (LOOP + "<tool_call>\n<think></think>", (), "hermes", "think"),
        (LOOP + "<tool_call>\n<function=f>", (), "qwen-xml", None),
        (LOOP + "<tool_call>{name}<arg_key><arg_value> </think>", (), "glm", "think"),
        (LOOP + "[TOOL_CALLS]", (), "mistral", None),
        (LOOP + "[INST]", ("[TOOL_CALLS]",), "mistral", None),
        (LOOP + "[TOOL_CALLS][THINK][/THINK]", (), "mistral", "mistral"),
        (LOOP + "<｜tool▁calls▁begin｜> </think>", (), "deepseek", "think"),
        (LOOP + "<｜DSML｜function_calls> </think>", (), "deepseek-dsml", "think"),
        (LOOP, ("｜DSML｜",), "deepseek-dsml", None),
        (LOOP + "<|tool_calls_section_begin|> </think>", (), "kimi", "think"),
        (LOOP + "<minimax:tool_call><invoke name= </think>", (), "minimax", "think"),
        (LOOP + "[gMASK]<sop>", (), "glm4", None),
        (LOOP + "[gMASK]<sop><tool_call>{name}<arg_key><arg_value> </think>", (), "glm", "think"),
        (LOOP + "<|python_start|>", (), "llama4", None),
        (LOOP, ("<|python_start|>",), "llama4", None),
        (LOOP + "<|channel|>analysis<|message|>", (), "harmony", "harmony"),
        (LOOP + "<start_of_turn>", (), "gemma", None),
        (LOOP + "<start_of_turn><start_function_call>call:", (), "function-gemma", None),
        (LOOP + "<|turn><|tool_call>call:<|channel>thought\n<channel|>", (), "gemma4", "gemma4"),
        ({"default": LOOP, "tool_use": LOOP + "<tool_call>"}, (), "hermes", None),
        (None, (), None, None),
    ],
)
def test_the_chat_template_shows_the_formats(
    template: Any, special_tokens: tuple[str, ...], tools: str | None, reasoning: str | None
) -> None:
    assert formats_of(codec_of(template, *special_tokens)) == ModelFormats(tools, reasoning)


def test_settings_win() -> None:
    codec = codec_of(LOOP + "<tool_call></think>")
    assert formats_of(codec, "none", "none") == ModelFormats(None, None)
    assert formats_of(codec, "llama3", "mistral") == ModelFormats("llama3", "mistral")


def test_a_parser_that_there_is_not_is_refused_with_the_names_of_those_there_are() -> None:
    check_names("hermes", "think")
    with pytest.raises(ServeError, match="'qwen' is no tool parser; there are auto, none, deepseek,"):
        check_names("qwen", "auto")
    with pytest.raises(ServeError, match="'hermes' is no reasoning parser"):
        check_names("auto", "hermes")


def test_special_tokens_are_kept_only_where_a_parser_needs_them() -> None:
    codec = codec_of(LOOP, "<|python_tag|>", "[THINK]")
    tag = codec.special_texts["<|python_tag|>"]
    llama = ModelFormats("llama3")
    assert AnswerFormat(llama, codec.special_texts, SCHEMAS).kept == {tag: "<|python_tag|>"}
    assert AnswerFormat(llama, codec.special_texts).kept == {}  # no tools, no calls
    assert AnswerFormat(llama, codec.special_texts, SCHEMAS, forced=True).kept == {}


def test_the_end_of_a_prompt_shows_whether_the_reasoning_has_begun() -> None:
    thinking = ModelFormats(None, "think")
    assert thinking.ends_within_reasoning("<|assistant|><think>\n")
    assert not thinking.ends_within_reasoning("<think>\n\n</think>\n\n")
    assert not thinking.ends_within_reasoning("about <think> tags")
    assert not ModelFormats().ends_within_reasoning("<think>")


def test_the_end_of_a_prompt_shows_whether_the_reasoning_is_over() -> None:
    thinking = ModelFormats(None, "think")
    assert thinking.ends_behind_reasoning("<|assistant|><think>\n\n</think>\n\n")
    assert thinking.ends_behind_reasoning("<|Assistant|></think>")
    assert not thinking.ends_behind_reasoning("<think>")
    assert not ModelFormats().ends_behind_reasoning("</think>")


def test_identifiers_of_calls_are_unique() -> None:
    for tools in (None, *TOOL_FORMATS):
        new_id = form(tools).new_id
        assert len({new_id("get_time", number) for number in range(100)}) == 100


def test_a_forced_answer_is_a_list_of_calls() -> None:
    text = '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]'
    forced = form("hermes", "think", forced=True)
    assert read(forced, text) == Answer(calls=[("get_weather", {"city": "Paris"}), ("get_time", {})])
    cut = '[{"name": "get_time", "arguments": {}}, {"name": "get_w'
    assert read(forced, cut) == Answer(', {"name": "get_w', calls=[("get_time", {})])
    assert read(forced, '[{"name"') == Answer('[{"name"')


def test_a_forced_answer_may_reason_first() -> None:
    calls = [("get_time", {})]
    text = '[{"name": "get_time", "arguments": {}}]'
    for tools, reasoning, begin, end in (
        ("hermes", "think", "<think>", "</think>\n\n"),
        ("mistral", "mistral", "[THINK]", "[/THINK]"),
    ):
        forced = form(tools, reasoning, forced=True)
        assert read(forced, begin + "[Now?]" + end + text) == Answer("", "[Now?]", calls)
        opened = form(tools, reasoning, forced=True, opened=True)
        assert read(opened, "[Now?]" + end + text) == Answer("", "[Now?]", calls)
    messages = "<|channel|>analysis<|message|>Now?<|end|><|start|>assistant"
    called = messages + "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}<|call|>"
    assert read(form("harmony", "harmony", forced=True), called) == Answer("", "Now?", calls)


# --- any text -----------------------------------------------------------------------------------------

MARKERS = sorted(
    {m for f in TOOL_FORMATS.values() for m in f.markers} | {t for ts in REASONING_TAGS.values() for t in ts}
)
FRAGMENTS = [
    *('{"name": "get_weather", "arguments": {"city": "Paris"}}', '{"name": "get_time", "parameters": {}}'),
    *("get_time", "function", "analysis", "final", "commentary to=functions.get_time", " to=functions.get_time"),
    *(
        "```tool_code",
        "```json",
        "```",
        "get_time()",
        "<function=get_time>",
        "</function>",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "\\",
        ",",
        ";",
    ),
    *(" ", "\n", " " * 40, "<", "<|", "a", "ö", "<tool", "word"),
]
TEXTS = st.lists(st.sampled_from(MARKERS) | st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=20).map("".join)
FORMATS = st.builds(
    form,
    st.sampled_from([None, *TOOL_FORMATS]),
    st.sampled_from([None, "harmony", *REASONING_TAGS]),
    special=st.sampled_from([{}, {marker: number for number, marker in enumerate(MARKERS)}]),
    opened=st.booleans(),
    forced=st.booleans(),
    single=st.booleans(),
    streams=st.booleans(),
)


@pytest.mark.slow
@given(FORMATS, TEXTS, st.lists(st.integers(1, 12), max_size=60))
def test_a_stream_gives_what_the_whole_answer_gives(how: AnswerFormat, text: str, sizes: list[int]) -> None:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    assert read_pieces(how, [*pieces, text[at:]]) == read_pieces(how, [text])


def without_space(text: str) -> str:
    return "".join(text.split())


@given(st.sampled_from(sorted(TOOL_FORMATS.keys() - {"harmony"})), TEXTS)
def test_text_without_calls_is_not_lost(tools: str, text: str) -> None:
    found = read_pieces(form(tools), [text])
    if not found.calls:
        assert without_space(found.content) == without_space(text)


@given(st.sampled_from(sorted(TOOL_FORMATS)), TEXTS)
def test_special_tokens_are_never_shown(tools: str, text: str) -> None:
    found = read_pieces(form(tools, special=special(tools)), [text])
    assert not any(marker in found.content for marker in special(tools) if marker not in without_markers(tools, text))


def without_markers(tools: str, text: str) -> str:
    """The text as a client sees it; what is left may make up another marker."""
    for marker in special(tools):
        text = text.replace(marker, "")
    return text


@given(
    st.sampled_from([None, *TOOL_FORMATS]),
    st.sampled_from([None, "harmony", *REASONING_TAGS]),
    st.text(alphabet=st.characters(exclude_characters="<[{`", exclude_categories=["Cs"])),
)
def test_text_without_markers_is_unchanged(tools: str | None, reasoning: str | None, text: str) -> None:
    assert read_pieces(form(tools, reasoning), [text]) == Answer(text)
