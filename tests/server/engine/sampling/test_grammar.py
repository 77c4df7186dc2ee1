"""Answers held to a schema are valid, whatever the model would rather say."""

from __future__ import annotations

import atexit
import json
from functools import cache
from typing import Any

import httpx
import pytest
import torch

from tests.server.live import MODEL

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

from bigmodel.server.engine import Failed
from bigmodel.server.engine.sampling.expressions import json_text
from bigmodel.server.engine.sampling.grammar import GrammarCompiler, GrammarError, grammar_size
from bigmodel.server.engine.sampling.kept import Kept
from tests.examples import alike
from tests.server.grammars import LocalState
from tests.server.tiny import ask, tiny_engine, tiny_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@cache
def compiler(stops: tuple[int, ...] = (260,)) -> GrammarCompiler:
    """One compiler of each kind for all tests: its process takes seconds to start."""
    made = GrammarCompiler(tiny_tokenizer(), 261, stops)
    atexit.register(made.close)
    return made


@pytest.mark.slow
@alike("stops", [(), (260,)], first=1)
def test_random_models_write_valid_answers(stops: tuple[int, ...]) -> None:
    grammar = compiler(stops).compile(json_text(SCHEMA))
    engine = tiny_engine()
    collectors = [ask(engine, "the cat", max_tokens=200, seed=s, grammar=grammar) for s in range(12)]
    answers = []
    for collector in collectors:
        collector.wait()
        assert collector.finish_reason() == "stop"
        answers.append(json.loads(collector.text()))
    engine.stop()
    for answer in answers:
        assert set(answer) == {"name", "age", "kind"}
        assert answer["name"].isalpha()
        assert len(answer["name"]) <= 8
        assert 0 <= answer["age"] <= 150
        assert answer["kind"] in ("cat", "dog")
    assert len({json.dumps(answer) for answer in answers}) > 6


@pytest.mark.slow
def test_a_schema_that_cannot_be_enforced_is_refused() -> None:
    with pytest.raises(GrammarError, match="nonsense"):
        compiler().compile(json_text({"type": "nonsense"}))


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "pattern"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "allOf"),
        ({"$ref": "http://host/schema.json"}, "ref"),
    ],
)
def test_schema_keywords_that_would_be_ignored_are_refused(part: dict[str, Any], named: str) -> None:
    with pytest.raises(GrammarError, match=f"schema.properties.x.*{named}"):
        compiler().compile(json_text({"type": "object", "properties": {"x": part}}))


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (nested(900), "nested"),
        ({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1001)}}, "parts"),
        ({"type": "string", "pattern": "(a|b){3,10000}"}, "repeats"),
        ({"type": "string", "pattern": "(a|b){" + "9" * 5000 + "}"}, "repeats"),
    ],
)
def test_schemas_that_would_take_minutes_to_compile_are_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        compiler().compile(json_text(schema))


@pytest.mark.slow
def test_a_list_of_many_values_is_small() -> None:
    compiler().compile(json_text({"enum": [f"v{i}" for i in range(5000)]}))


def test_schemas_that_no_answer_fits_are_refused_before_a_step() -> None:
    with pytest.raises(GrammarError, match="no answer fits"):
        compiler().compile(json_text({"$ref": "#"}))


@pytest.mark.slow
def test_the_cache_of_compiled_schemas_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiler()
    monkeypatch.setattr(made, "_kept", Kept(20_000, 20_000, grammar_size))
    for number in range(15):
        made.compile(json_text({"type": "string", "pattern": f"^[a-z]{{{number + 1}}}$"}))
    assert 0 < made.kept_bytes < 40_000  # all of them take 59,000


@pytest.mark.slow
def test_a_grammar_without_a_possible_next_token_fails_with_a_reason() -> None:
    quote = tiny_tokenizer().encode('"')[0]  # said to end a text, so that no member can be named
    grammar = compiler((quote,)).compile(json_text(SCHEMA))
    engine = tiny_engine()
    failed = ask(engine, "the cat", max_tokens=200, seed=0, grammar=grammar).wait()
    engine.stop()
    assert isinstance(failed, Failed)
    assert "no token can go on" in failed.message


def test_a_property_may_be_named_like_a_keyword() -> None:
    compiler().compile(json_text({"type": "object", "properties": {"not": {"enum": [{"if": 1}]}}}))


@pytest.mark.parametrize(
    ("schema", "control"),
    [
        ({"type": "string", "maxLength": 2}, '"\t'),
        ({"type": "string", "minLength": 1, "maxLength": 1}, '"\x1f'),
        ({"type": "object", "properties": {"a\n": {"type": "string", "minLength": 1}}}, '{"a\\n":"\x00'),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, '{"\x0b'),
    ],
)
def test_a_string_of_bounded_length_has_no_control_characters(schema: dict[str, Any], control: str) -> None:
    state = LocalState(compiler().compile(json_text(schema)))
    *before, last = tiny_tokenizer().encode(control)
    for token in before:
        state.advance(token)
    scores = torch.zeros(261)
    state.mask(scores)
    assert scores[last] == -torch.inf
    assert scores[tiny_tokenizer().encode("x")[0]] == 0


@pytest.mark.parametrize(("least", "most"), [(0, 5), (0, 64), (3, 70), (0, 200), (40, 1000), (100, 100)])
def test_a_string_has_as_many_characters_as_its_schema_says(least: int, most: int) -> None:
    member = {"type": "string", "minLength": least, "maxLength": most}
    schema = {"type": "object", "properties": {"a": member, "b": member}, "required": ["a", "b"]}
    grammar = compiler().compile(json_text(schema))
    quote, letter = tiny_tokenizer().encode('"x')
    for length in {0, least - 1, least, (least + most) // 2, most - 1, most} - {-1}:
        state = LocalState(grammar)
        for token in tiny_tokenizer().encode('{"a":"' + "x" * length):
            state.advance(token)
        scores = torch.zeros(261)
        state.mask(scores)
        assert (bool(scores[quote] == 0), bool(scores[letter] == 0)) == (length >= least, length < most)


def test_a_value_that_looks_like_a_grammar_is_written_as_it_is() -> None:
    value = '[^\\"\\\\\\r\\n] "[^ root_characters{0, 500}'
    schema = {"type": "array", "prefixItems": [{"const": value}, {"type": "string", "maxLength": 2}], "minItems": 2}
    state = LocalState(compiler().compile(json_text(schema)))
    for token in tiny_tokenizer().encode(json.dumps([value, "ab"], separators=(",", ":"))):
        state.advance(token)
    assert state.complete


def chat(url: str, response_format: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a cat"}],
        "response_format": response_format,
        "max_tokens": 200,
        "seed": 4,
        **fields,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.slow
def test_response_formats_are_served_over_http(url: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    answer = chat(url, wanted)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"])["kind"] in ("cat", "dog")
    bad = chat(url, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "response_format"


@pytest.mark.slow
def test_the_format_json_object_accepts_any_object(url: str) -> None:
    answer = chat(url, {"type": "json_object"}, seed=8, logit_bias={"92": 8, "1": 6}, temperature=0.7)
    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), dict)
