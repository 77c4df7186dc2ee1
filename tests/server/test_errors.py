"""Errors are written as OpenAI writes them."""

from __future__ import annotations

import json

import pytest

from bigmodel.server.errors import APIError, bad_value


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "invalid_request_error"),
        (413, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
        (504, "timeout_error"),
    ],
)
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    assert APIError(status, "why").body["error"]["type"] == kind


def test_the_answer_names_what_is_wrong() -> None:
    answer = APIError(429, "full", param="n", code="queue_full", headers={"Retry-After": "1"}).response()
    assert json.loads(answer.body) == {
        "error": {"message": "full", "type": "rate_limit_error", "param": "n", "code": "queue_full"}
    }
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


def test_what_is_no_unicode_is_quoted_all_the_same() -> None:
    error = bad_value("a\ud800", "'\ud800' is no text").body["error"]
    assert (error["param"], error["message"]) == ("a\\ud800", "'\\ud800' is no text")
