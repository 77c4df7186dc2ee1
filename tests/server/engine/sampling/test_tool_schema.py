"""Answers that are lists of calls are held to the schemas of the functions' arguments."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

from bigmodel.server.engine.sampling.expressions import json_text
from bigmodel.server.engine.sampling.grammar import Grammar, GrammarError
from bigmodel.server.engine.sampling.tool_schema import calls_schema
from tests.server.engine.sampling.test_grammar import compiler, nested
from tests.server.grammars import LocalState
from tests.server.tiny import tiny_tokenizer

FUNCTIONS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/size"}},
        "required": ["a"],
        "$defs": {"size": {"enum": ["big", "small"]}},
    },
    "g": {"type": "object", "properties": {}},
}


def after(grammar: Grammar, text: str) -> LocalState | None:
    """The state after a text, written without special tokens; None if no answer begins with it."""
    state = LocalState(grammar)
    try:
        for token in (token for part in re.split("(?<=<)", text) for token in tiny_tokenizer().encode(part)):
            state.advance(token)
    except RuntimeError:
        return None
    return state


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer, which cannot go on."""
    state = after(grammar, text)
    return state is not None and state.complete


def may_end(grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer, which may go on."""
    state = after(grammar, text)
    if state is None or state.complete:
        return state is not None
    scores = torch.zeros(261)
    state.mask(scores)
    return bool(scores[260] == 0)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("calls", "fits", "fits_single"),
    [
        ([call("f", a="big")], True, True),
        ([call("g")], True, True),
        ([call("g"), call("f", a="big")], True, False),
        ([], False, False),
        ([call("f", a="other")], False, False),
        ([call("f")], False, False),
        ([call("g", a="big")], False, False),
        ([call("h")], False, False),
        (call("g"), False, False),
    ],
)
def test_only_calls_that_fit_are_accepted(calls: Any, fits: bool, fits_single: bool) -> None:
    for single, wanted in ((False, fits), (True, fits_single)):
        grammar = compiler().compile(json_text(calls_schema(FUNCTIONS, single=single)))
        assert accepts(grammar, json.dumps(calls)) == wanted


def test_references_hold_and_values_that_look_like_them_are_unchanged() -> None:
    parameters = {"properties": {"a": {"$ref": "#/$defs/x"}, "$ref": {"enum": [{"$ref": "#/x"}]}}, "$defs": {"x": {}}}
    assert calls_schema({"f": parameters}, single=True)["$defs"]["0_f"] == {
        **parameters,
        "properties": {"a": {"$ref": "#/$defs/0_f/$defs/x"}, "$ref": {"enum": [{"$ref": "#/x"}]}},
    }


def test_functions_are_told_apart_whatever_their_names() -> None:
    functions = dict.fromkeys(("a/b", "a.b", "a:b-c_d", "mcp/x/y"), FUNCTIONS["f"])
    grammar = compiler().compile(json_text(calls_schema(functions, single=True)))
    for name in functions:
        assert accepts(grammar, json.dumps([call(name, a="big")]))
        assert not accepts(grammar, json.dumps([call(name, a="other")]))


def test_a_function_whose_schema_cannot_be_held_is_named() -> None:
    functions = {**FUNCTIONS, "other": {"type": "object", "properties": {"a": {"not": {}}}}}
    with pytest.raises(GrammarError, match=r"\$defs.2_other.properties.a: 'not' is not supported"):
        compiler().compile(json_text(calls_schema(functions, single=True)))


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(GrammarError, match="nested"):
        calls_schema({"f": nested(900)}, single=True)
