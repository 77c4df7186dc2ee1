"""A JSON object is checked as it comes, and what is let through does not depend on how the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.server.answers.parsers.calls import read_json
from bigmodel.server.answers.parsers.object_text import DEPTH, ObjectText


def written(pieces: list[str]) -> tuple[str, str, str]:
    """The state after the pieces, what was let through, and what was not read."""
    text, rest, through = ObjectText(), "", ""
    for number, piece in enumerate(pieces):
        used, more = text.read(rest + piece, last=number == len(pieces) - 1)
        rest = (rest + piece)[used:]
        through += more
    return text.state, through, rest


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"a": [1, -2.5e+3, true, null, {"b": "}\\"\\u00e9 ö"}], "c": []}',
        '{\n  "a" : {"b": {} } ,\t"d": ""}',
    ],
)
def test_objects_are_let_through_as_they_are(text: str) -> None:
    assert written([text]) == ("complete", text, "")
    assert written([*text]) == ("complete", text, "")
    assert written([text + " x"]) == ("complete", text, " x")
    for cut in range(1, len(text)):
        assert written([text[:cut]]) == ("open", text[:cut], "")


def test_control_characters_in_strings_are_escaped() -> None:
    state, through, _ = written(['{"a": "x\ny\x00"}'])
    assert (state, json.loads(through)) == ("complete", {"a": "x\ny\x00"})


@pytest.mark.parametrize(
    ("python", "json_text"),
    [
        ("{'a': 'x', \"b\": 'it\\'s \"y\"'}", '{"a": "x", "b": "it\'s \\"y\\""}'),
        ("{'a': [True, False, None]}", '{"a": [true, false, null]}'),
        ('{"a": "it\\\'s \'x\'"}', '{"a": "it\'s \'x\'"}'),
    ],
)
def test_strings_and_constants_of_python_become_those_of_json(python: str, json_text: str) -> None:
    assert written([python]) == ("complete", json_text, "")
    assert written([*python]) == ("complete", json_text, "")
    for cut in range(1, len(python)):
        state, through, rest = written([python[:cut]])
        assert (state, rest) == ("open", "")
        assert json_text.startswith(through.removesuffix("\\"))


@pytest.mark.parametrize(
    ("begin", "wrong"),
    [
        *(('{"a": ', "oops}"), ('{"a": ', "01}"), ('{"a": ', "1e999}"), ('{"a": ', "NaN}"), ('{"a": ', "9" * 5000)),
        *(("{", "a: 1}"), ('{"a": 1, ', "}"), ('{"a": [1, ', "]}"), ('{"a": "', '\\x"}'), ('{"a": [', "}")),
        ('{"a": ' + "[" * (DEPTH - 1), "[]"),
    ],
)
def test_what_is_no_json_is_not_let_through(begin: str, wrong: str) -> None:
    assert written([begin + wrong]) == ("broken", begin, wrong)
    state, through, _ = written([*(begin + wrong)])
    assert (state, through) == ("broken", begin)


@given(st.text(alphabet='{}[]",:\\ue019.-+ tru\n', max_size=30), st.lists(st.integers(1, 5), max_size=12))
def test_any_text_is_an_object_where_python_says_so(text: str, sizes: list[int]) -> None:
    text = "{" + text
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    state, through, rest = written([*pieces, text[at:]])
    assert written([text])[:2] == (state, through)
    assert (state == "complete" and not rest.strip(" \t\n\r")) == isinstance(read_json(text), dict)
