"""Requests made from the OpenAPI document: whatever is sent, the answer is an error object or right, never a 500."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.examples import few

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "route",
    [
        pytest.param("POST /v1/completions", marks=pytest.mark.long),
        pytest.param("POST /v1/chat/completions", marks=pytest.mark.long),
        pytest.param("POST /tokenize", marks=pytest.mark.slow),
        pytest.param("POST /v1/messages", marks=pytest.mark.slow),
        pytest.param("POST /v1/messages/count_tokens", marks=pytest.mark.long),
        pytest.param("POST /v1/responses", marks=pytest.mark.long),
        pytest.param("POST /v1/embeddings", marks=pytest.mark.slow),
        pytest.param("POST /v1/rerank", marks=pytest.mark.slow),
        "POST /detokenize",
        pytest.param("POST /v1/files", marks=pytest.mark.slow),
        *("POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{batch_id}", "POST /v1/batches/{batch_id}/cancel"),
        *("GET /v1/files", "GET /v1/files/{file_id}", "GET /v1/files/{file_id}/content", "DELETE /v1/files/{file_id}"),
        *("GET /v1/models", "GET /v1/models/{name}", "GET /plan", "GET /health", "GET /ready"),
    ],
)
def test_no_request_breaks_the_server(url: str, route: str) -> None:
    method, _, path = route.partition(" ")
    operation = schemathesis.openapi.from_url(f"{url}/openapi.json")[path][method]

    @given(case=operation.as_strategy())
    @settings(max_examples=few(4), deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def check(case: Any) -> None:
        answer = case.call()
        assert answer.status_code < 500 or answer.status_code == 504, answer.text
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["message"]
            assert error["type"]

    check()
