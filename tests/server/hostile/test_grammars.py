"""Schemas that would stop or end a server that compiles them itself."""

from __future__ import annotations

import atexit
from functools import cache
from typing import Any

import httpx
import pytest

from tests.server.live import MODEL
from tests.server.tiny import tiny_tokenizer

pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install bigmodel[json]")

from bigmodel.server.engine.sampling.grammar import GrammarCompiler, GrammarError


@cache
def worker_of() -> GrammarCompiler:
    made = GrammarCompiler(tiny_tokenizer(), 261, (260,))
    made._worker._hello = made._worker._hello.replace('"seconds": 5.0', '"seconds": 0.5')
    atexit.register(made.close)
    return made


def pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


BOMBS = {
    "nested parentheses": pattern("(" * 60_000 + "a" + ")" * 60_000),
    "repeated repeats": pattern("((.{0,300}){0,300}){0,300}"),
    "a long text": pattern("a" * 1_000_000),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name != "nested parentheses" else ()) for name in BOMBS]
)
def test_an_expensive_schema_is_refused_and_the_next_one_compiles(name: str) -> None:
    with pytest.raises(GrammarError, match="takes too much"):
        worker_of().compile(BOMBS[name])
    worker_of().compile({"type": "string", "pattern": "^[a-z]{2}$"})


def test_a_refused_schema_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker_of()
    bomb = {"type": "string", "pattern": "(" * 70_000 + "a" + ")" * 70_000}
    with pytest.raises(GrammarError):
        made.compile(bomb)
    monkeypatch.setattr(made._worker, "compile", None)
    with pytest.raises(GrammarError):
        made.compile(bomb)


def test_a_schema_of_nested_parentheses_does_not_end_the_server(url: str) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": BOMBS["nested parentheses"]},
        },
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=100)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert len(answer.content) <= 1024
    assert httpx.get(f"{url}/health").status_code == 200
