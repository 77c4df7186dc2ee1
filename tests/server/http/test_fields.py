"""No field of any known client is silently ignored: each is honoured, asks for nothing, or is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import ValidationError

from bigmodel.server.http.errors import from_validation
from bigmodel.server.http.fields import BODIES, KNOWN, OWN, Row, rows
from bigmodel.server.http.fields_table import table
from bigmodel.server.http.neutral import NEUTRAL

HI = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": HI},
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": HI},
    "/v1/messages/count_tokens": {"model": "m", "messages": HI},
    "/v1/embeddings": {"model": "m", "input": "hi"},
    "/v1/rerank": {"model": "m", "query": "hi", "documents": ["a"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
OF_MODELS = [path for path in GOOD if path != "/v1/batches"]  # the requests of a batch name a model
ALL = [(path, row) for path in BODIES for row in rows(path)]
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "serve-fields.md"


@pytest.mark.slow
def test_every_route_with_a_body_is_listed(app: Any) -> None:
    posted = {
        path
        for path, methods in app.openapi()["paths"].items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert posted == set(BODIES) == set(KNOWN) == set(GOOD)


@pytest.mark.parametrize(("path", "row"), [(p, r) for p, r in ALL if not r.honoured], ids=lambda value: str(value)[:60])
def test_a_field_that_is_not_honoured_is_refused_by_name_unless_it_asks_for_nothing(path: str, row: Row) -> None:
    body, good = BODIES[path], GOOD[path]
    plain = body.model_validate(good)
    for value in (None, *row.neutral):
        assert body.model_validate({**good, row.name: value}) == plain
    for value in ("something", 7, True, False, [1], {"a": 1}):
        if any(type(value) is type(each) and value == each for each in row.neutral):
            continue
        with pytest.raises(ValidationError) as refused:
            body.model_validate({**good, row.name: value})
        error = from_validation([{**each, "loc": ("body", *each["loc"])} for each in refused.value.errors()])
        assert (error.status, error.param, error.code) == (400, row.name, "unsupported_parameter")


@pytest.mark.parametrize("path", BODIES)
def test_every_field_of_a_body_is_one_that_clients_know(path: str) -> None:
    own = {field.alias or name for name, field in BODIES[path].model_fields.items()}
    assert own <= {row.name for row in rows(path)}
    assert {row.name for row in rows(path) if row.honoured} == own


def test_values_that_ask_for_nothing_are_of_fields_that_bodies_do_not_have() -> None:
    named = {body.__name__: {row.name for row in rows(path)} for path, body in BODIES.items()}
    for body, fields in NEUTRAL.items():
        assert fields.keys() <= named[body], body
    assert not [row for _, row in ALL if row.honoured and row.neutral]
    assert all(name in {row.name for row in rows(path)} for path, names in OWN.items() for name in names)


def test_openais_client_has_no_field_that_is_not_listed() -> None:
    from openai.types import BatchCreateParams, EmbeddingCreateParams, completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    for path, params in (
        ("/v1/chat/completions", chat_create_params.CompletionCreateParamsBase),
        ("/v1/completions", completion_create_params.CompletionCreateParamsBase),
        ("/v1/responses", response_create_params.ResponseCreateParamsBase),
        ("/v1/embeddings", EmbeddingCreateParams),
        ("/v1/batches", BatchCreateParams),
    ):
        assert set(params.__annotations__) - {"stream"} <= set(KNOWN[path]["OpenAI"]), path


def test_anthropics_client_has_no_field_that_is_not_listed() -> None:
    types = pytest.importorskip("anthropic.types", reason="anthropic is not installed: pip install bigmodel[test]")
    from anthropic.types.message_create_params import MessageCreateParamsBase

    for path, params in (
        ("/v1/messages", MessageCreateParamsBase),
        ("/v1/messages/count_tokens", types.MessageCountTokensParams),
    ):
        assert set(get_type_hints(params)) <= set(KNOWN[path]["Anthropic"]), path


def test_the_guide_has_the_table() -> None:
    """With UPDATE_DOCS=1 it is written."""
    text = GUIDE.read_text(encoding="utf-8")
    begin, end = "<!-- fields -->\n\n", "<!-- end of fields -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    wanted = before + begin + "\n".join(f"## {path}\n\n{table(path)}\n" for path in BODIES) + "\n" + end + after
    if os.environ.get("UPDATE_DOCS") == "1":
        GUIDE.write_text(wanted, encoding="utf-8")
    assert text == wanted or os.environ.get("UPDATE_DOCS") == "1"
