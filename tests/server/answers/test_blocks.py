"""Deltas become blocks: text of a kind together, each call apart."""

from __future__ import annotations

from bigmodel.server.answers.blocks import BlockReader, Closed, Grown, Opened
from bigmodel.server.answers.parsers.formats import AnswerFormat, ModelFormats
from bigmodel.server.engine import Delta
from bigmodel.server.engine.scheduling.request import TokenLogprob

FORM = AnswerFormat(ModelFormats("hermes", "think"), schemas={"f": {}}, streams=True)
TEXT = '<think>\nwhy\n</think>so<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXT += '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def read(text: str, size: int, *, shows_reasoning: bool = True) -> tuple[BlockReader, list[tuple[str, int]]]:
    """The reader after a text in pieces, and what it said of blocks by number."""
    reader = BlockReader(FORM, shows_reasoning=shows_reasoning)
    events = []
    for at in range(0, len(text), size):
        last = at + size >= len(text)
        piece = text[at : at + size]
        events += reader.read(Delta(0, piece, tuple(range(len(piece))), finish_reason="stop" if last else None))
    return reader, [(type(event).__name__, event.block.index) for event in events]


def test_blocks_do_not_depend_on_how_the_text_is_cut() -> None:
    for size in (1, 7, 1000):
        reader, events = read(TEXT, size)
        assert [(block.kind, block.text, block.name) for block in reader.blocks] == [
            ("reasoning", "why", ""),
            ("content", "so", ""),
            ("call", '{"a": 1}', "f"),
            ("call", "{}", "f"),
        ]
        for index in range(4):
            of_block = [kind for kind, at in events if at == index]
            assert of_block == [Opened.__name__, *[Grown.__name__] * (len(of_block) - 2), Closed.__name__]
        assert [at for _, at in events] == sorted(at for _, at in events)
        assert (reader.calls, reader.finish_reason, reader.tokens) == (True, "stop", len(TEXT))


def test_reasoning_may_be_left_out_and_is_counted_all_the_same() -> None:
    reader, _ = read(TEXT, 1, shows_reasoning=False)
    assert [block.kind for block in reader.blocks] == ["content", "call", "call"]
    assert len("<think>\nwhy") <= reader.reasoning_tokens <= len("<think>\nwhy\n</think>")
    assert read("so", 1)[0].reasoning_tokens == 0


def test_without_a_format_all_is_content() -> None:
    reader = BlockReader(None)
    reader.read(Delta(0, "<think>", (1,)))
    reader.read(Delta(0, "", (), finish_reason="stop", stop="x"))
    assert [(block.kind, block.text) for block in reader.blocks] == [("content", "<think>")]
    assert reader.stop == "x"


def test_tokens_whose_text_is_held_back_keep_their_log_probabilities() -> None:
    reader = BlockReader(FORM)
    for number, letter in enumerate("a <to b"):  # what may begin a call is shown once it does not
        reader.read(Delta(0, letter, (number,), (TokenLogprob(number, -1.0),)))
    reader.read(Delta(0, "", finish_reason="stop"))
    assert [(block.kind, block.text) for block in reader.blocks] == [("content", "a <to b")]
    assert [each.token_id for each in reader.blocks[0].logprobs] == list(range(7))


def test_arguments_grow_and_a_call_that_breaks_off_is_none() -> None:
    reader = BlockReader(FORM)
    text = '<tool_call>{"name": "f", "arguments": {"a": "long'
    events = [event for letter in text for event in reader.read(Delta(0, letter))]
    assert "".join(event.text for event in events if isinstance(event, Grown)) == '{"a": "long'
    assert len(events) == 1 + len('{"a": "long')
    reader.read(Delta(0, "", finish_reason="length"))
    assert [(block.kind, block.complete) for block in reader.blocks] == [("call", False)]
    assert not reader.calls
