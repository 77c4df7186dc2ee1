"""Errors are written as OpenAI writes them.

What is wrong with a body is said in one sentence about one field.

Whatever goes wrong, the client gets an error object and the server counts it.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from bigmodel.server.http.bodies import Body
from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.errors import APIError, bad_value, from_validation, unreadable
from bigmodel.server.http.text_bodies import CompletionBody
from tests.server.http.test_metrics import value
from tests.server.live import serving, tiny_app


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


def test_the_error_names_the_wrong_field() -> None:
    answer = APIError(429, "full", param="n", code="queue_full", headers={"Retry-After": "1"}).response()
    assert json.loads(answer.body) == {
        "error": {"message": "full", "type": "rate_limit_error", "param": "n", "code": "queue_full"}
    }
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


def test_invalid_unicode_is_quoted() -> None:
    error = bad_value("a\ud800", "'\ud800' is no text").body["error"]
    assert (error["param"], error["message"]) == ("a\\ud800", "'\\ud800' is no text")


def error_of(schema: type[Body], value: Any) -> APIError:
    """The error about ``value``, with places as FastAPI gives them."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(value)
    return from_validation([{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()])


def completion(**fields: Any) -> APIError:
    return error_of(CompletionBody, {"model": "m", "prompt": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "'n': must be greater than or equal to 1"),
        ({"n": True}, "'n': must be a valid integer"),
        ({"n": "x", "prompt": [[1], ["a"]]}, "'n': must be a valid integer"),
        ({"prompt": 7}, "'prompt': must be a valid string or a valid list"),
        ({"prompt": [1.5]}, "'prompt.0': must be a valid integer or a valid string or a valid list"),
        ({"prompt": [[1], ["a"]]}, "'prompt.1.0': must be a valid integer"),
        ({"stop": "x" * 257}, "'stop': a stop string has 1 to 256 characters, not 257"),
        ({"response_format": "json"}, "'response_format': must be an object"),
        ({"best_of": 2}, "'best_of': is not supported where it is not n"),
        ({"frob": 1}, "'frob' is not supported by this server"),
    ],
)
def test_an_error_names_the_field_and_the_reason(fields: dict[str, Any], message: str) -> None:
    assert completion(**fields).message == message


def test_the_error_code_is_machine_readable() -> None:
    faults = [completion(n=0), completion(n="1"), completion(frob=1), error_of(CompletionBody, {"prompt": "x"})]
    assert [(fault.status, fault.code, fault.param) for fault in faults] == [
        (400, "invalid_value", "n"),
        (422, "invalid_type", "n"),
        (400, "unsupported_parameter", "frob"),
        (422, "missing_required_parameter", "model"),
    ]


def test_the_path_of_a_nested_field_is_named() -> None:
    fault = error_of(ChatBody, {"model": "m", "messages": [{"role": "user", "content": 5}]})
    assert fault.message == "'messages.0.content': must be a valid string or a valid list"


def test_a_body_that_is_not_an_object_is_explained() -> None:
    fault = error_of(CompletionBody, "text")
    assert (fault.status, fault.param) == (422, None)
    assert "JSON object" in fault.message


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RecursionError(), "nested too deeply"),
        (UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "invalid start byte"), "byte 2 is not UTF-8"),
        (ValueError("Exceeds the limit (4300 digits) for integer string conversion"), "too many digits"),
    ],
)
def test_the_position_of_invalid_json_is_named(error: RecursionError | ValueError, why: str) -> None:
    fault = unreadable(error)
    assert (fault.status, fault.code) == (400, "invalid_json")
    assert why in fault.message


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a":' * 5000, "nested too deeply"),
        (b'{"model": "\xff"}', "is not UTF-8"),
        (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"model": "tiny",', "no valid JSON"),
    ],
)
def test_invalid_json_is_a_bad_request(url: str, text: bytes, why: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=text, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert why in error["message"]


def test_the_place_of_a_mistake_in_json_is_named(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=b'{"model": "tiny", "n": 1,}', headers=JSON)
    assert answer.json()["error"]["message"].endswith(" at character 25")


def test_a_request_without_a_body_is_told_what_one_is(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", headers=JSON)
    assert answer.status_code == 422
    assert answer.json()["error"] == {
        "message": "there is no body: the body must be a JSON object, sent with 'Content-Type: application/json'",
        "type": "invalid_request_error",
        "param": None,
        "code": "missing_required_parameter",
    }


def test_unknown_routes_and_methods_are_404_and_405(url: str) -> None:
    missing, refused = httpx.get(f"{url}/v1/nothing"), httpx.get(f"{url}/v1/completions")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_supported")
    assert refused.headers["allow"] == "POST"


@pytest.mark.slow
def test_an_unexpected_error_shows_no_details() -> None:
    app = tiny_app()

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("a secret")

    with serving(app) as url:
        answer = httpx.get(f"{url}/broken")
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in answer.text
        assert value(url, "bigmodel_requests_total", outcome="refused_500") == 1
