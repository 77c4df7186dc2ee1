"""Outputs that models of each family really wrote, and that are recorded in public, are read as their users expect.

A file in `recorded/` holds those of a family: the text, where it is recorded and what was left out, the functions, and
how it is to be read, which follows from the family's format and not from what the parser did.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bigmodel.server.answers.parsers.formats import TOOL_FORMATS, AnswerFormat, ModelFormats
from tests.examples import alike
from tests.server.answers.parsers.reading import Answer, read_pieces, special

FILES = sorted((Path(__file__).parent / "recorded").glob("*.json"))
FAMILIES = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in FILES}
OUTPUTS = [
    pytest.param(family, output, id=f"{name}-{number}")
    for name, family in FAMILIES.items()
    for number, output in enumerate(family["outputs"])
]
SPLITS = 20


def each(*long: str) -> pytest.MarkDecorator:
    """Parametrize a test over the outputs, of which those of these names are long."""
    named = [output for output in OUTPUTS if output.id in long]
    others = [output for output in OUTPUTS if output.id not in long]
    return alike(("family", "output"), [*others, *named], first=len(others))


def how(family: dict[str, Any], output: dict[str, Any], *, hidden: bool = False, streams: bool = False) -> AnswerFormat:
    """How the output is read; ``hidden``: with the markers of the family as special tokens."""
    return AnswerFormat(
        ModelFormats(family["tools"], family.get("reasoning")),
        special=special(family["tools"]) if hidden else {},
        schemas=output["tools"],
        opened=output.get("opened", False),
        streams=streams,
    )


def expected(output: dict[str, Any]) -> Answer:
    reads = output["reads"]
    return Answer(reads["content"], reads["reasoning"], [(name, arguments) for name, arguments in reads["calls"]])


def splits(text: str) -> list[list[str]]:
    """The text whole, cut in two at each character, letter by letter, and in random pieces."""
    cuts = [[text], [*text], *([text[:at], text[at:]] for at in range(1, len(text)))]
    chance = random.Random(len(text))
    for _ in range(SPLITS):
        places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 12))))
        cuts.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return cuts


@each("qwen-xml-1")
def test_an_output_is_read_as_its_users_expect_at_every_split(family: dict[str, Any], output: dict[str, Any]) -> None:
    for pieces in splits(output["text"]):
        assert read_pieces(how(family, output), pieces) == expected(output), pieces


@each("hermes-4", "qwen-xml-1")
def test_markers_that_are_special_tokens_are_not_shown(family: dict[str, Any], output: dict[str, Any]) -> None:
    wanted = expected(output)
    for marker in special(family["tools"]):
        wanted.content = wanted.content.replace(marker, "")
    for pieces in splits(output["text"]):
        assert read_pieces(how(family, output, hidden=True), pieces) == wanted, pieces


@each("hermes-4", "qwen-xml-1")
def test_a_stream_gives_the_same_calls_as_they_are_written(family: dict[str, Any], output: dict[str, Any]) -> None:
    wanted = expected(output)
    for pieces in splits(output["text"]):
        found = read_pieces(how(family, output, streams=True), pieces)
        if found.broken:  # arguments that were sent before they turned out to be none, or to have no end
            assert output.get("malformed") or output["quoted"] == "the beginning"
        else:
            assert found == wanted, pieces
        assert (found.calls, found.reasoning) == (wanted.calls, wanted.reasoning)


def test_malformed_outputs_come_back_as_text() -> None:
    malformed = [output for family in FAMILIES.values() for output in family["outputs"] if output.get("malformed")]
    assert len(malformed) >= 10
    for output in malformed:
        assert output["reads"]["calls"] == []
        assert (
            output["text"].endswith(output["reads"]["content"].lstrip()) or output["reads"]["content"] in output["text"]
        )


def test_every_output_says_where_it_is_from() -> None:
    assert FAMILIES.keys() <= TOOL_FORMATS.keys()
    for family in FAMILIES.values():
        for output in family["outputs"]:
            assert all(output[key] for key in ("checkpoint", "source", "quoted"))
