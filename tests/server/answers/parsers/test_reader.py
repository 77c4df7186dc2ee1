"""Markers are found whole in text that arrives in pieces, and nothing of them is shown before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.server.answers.parsers.parts import AnswerPart, Content, Reasoning, ToolCall
from bigmodel.server.answers.parsers.reader import GAP, AnswerParser, Reading, TextReader


def shouted(reader: TextReader) -> Reading[None]:
    """Reasoning is what stands between <b> and </b>."""
    while True:
        begin = yield from reader.until(("<b>",), reader.content)
        if not begin.marker:
            return
        yield from reader.until(("</b>",), reader.reasoning)


def parser_of_shouts(*hidden: str) -> AnswerParser:
    reader = TextReader(hidden)
    return AnswerParser(reader, shouted(reader))


def test_text_is_shown_as_it_arrives() -> None:
    parser = parser_of_shouts()
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(", you") == [Content(", you")]
    assert parser.finish() == []


def test_the_beginning_of_a_marker_is_held_back_until_it_is_one_or_none() -> None:
    parser = parser_of_shouts()
    assert parser.push("a<") == [Content("a")]
    assert parser.push("b") == []
    assert parser.push("r>c<b") == [Content("<br>c")]
    assert parser.push(">d") == [Reasoning("d")]
    assert parser.push("e<") == [Reasoning("e")]
    assert parser.finish() == [Reasoning("<")]


def test_white_space_before_a_marker_belongs_to_it() -> None:
    parser = parser_of_shouts()
    assert parser.push("a \n") == [Content("a")]
    assert parser.push("b ") == [Content(" \nb")]
    assert parser.push("<b>x </b>c ") == [Reasoning("x"), Content("c")]
    assert parser.finish() == [Content(" ")]


def test_long_white_space_is_not_held_back() -> None:
    parser = parser_of_shouts()
    assert parser.push(" " * (GAP + 5)) == [Content(" " * 5)]
    assert parser.push("<b>") == []


def test_hidden_texts_are_never_shown() -> None:
    parser = parser_of_shouts("<|x|>", "<b>")
    assert parser.push("a<|x") == [Content("a")]
    assert parser.push("|>b<|x|><b>c<|x|>d</b>") == [Content("b"), Reasoning("cd")]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, {"b": "}"}]} rest', '{"a": [1, {"b": "}"}]}'),
        ('["\\"]", "\\\\"], 2', '["\\"]", "\\\\"]'),
        ('{"never": "ends', '{"never": "ends'),
        ("{'a': '}', \"b\": \"it's\"} 'rest'", "{'a': '}', \"b\": \"it's\"}"),
        ("[f(a= ']\"'), it's] rest", "[f(a= ']\"'), it's]"),
        ("no value", ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_json_value_ends_with_its_last_bracket(text: str, value: str, size: int) -> None:
    found: list[str] = []

    def reading(reader: TextReader) -> Reading[None]:
        found.append((yield from reader.value("{[")))

    reader = TextReader()
    parser = AnswerParser(reader, reading(reader))
    rest: list[AnswerPart] = []
    for at in range(0, len(text), size):
        rest += parser.push(text[at : at + size])
    rest += parser.finish()
    assert found == [value]
    assert "".join(part.text for part in rest if isinstance(part, Content)) == text.removeprefix(value)


@pytest.mark.parametrize(("text", "found"), [("[a", "["), ("[ab]c", "[ab]"), ("[ac", "["), ("x", ""), ("", "")])
def test_the_longest_option_is_taken(text: str, found: str) -> None:
    for pieces in ([text], [*text]):
        taken: list[str] = []

        def reading(reader: TextReader, taken: list[str] = taken) -> Reading[None]:
            taken.append((yield from reader.starts("[", "[ab]")))

        reader = TextReader()
        parser = AnswerParser(reader, reading(reader))
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        assert taken == [found]


def test_an_answer_of_one_call_ends_with_it() -> None:
    reader = TextReader(single=True)
    reader.content("a")
    reader.calls([ToolCall("f", "{}"), ToolCall("g", "{}")])
    reader.content("b")
    assert reader.take() == [Content("a"), ToolCall("f", "{}")]


def test_what_is_held_back_stays_small() -> None:
    reader = TextReader()
    parser = AnswerParser(reader, shouted(reader))
    for _ in range(1000):
        parser.push("word   <")
        assert len(reader._text) < GAP


@given(st.text(alphabet="ab <>/|x\n"), st.lists(st.integers(0, 40)))
def test_what_is_found_does_not_depend_on_the_pieces(text: str, sizes: list[int]) -> None:
    def merged(pieces: list[str]) -> dict[str, str]:
        parser = parser_of_shouts("<|x|>")
        found = {"Content": "", "Reasoning": ""}
        for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
            assert isinstance(part, Content | Reasoning)
            found[type(part).__name__] += part.text
        return found

    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    assert merged([*pieces, text[at:]]) == merged([text])
