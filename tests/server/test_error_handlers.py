"""Whatever goes wrong, the client gets an error object and the server counts it."""

from __future__ import annotations

import httpx
import pytest

from tests.server.live import serving, tiny_app
from tests.server.test_metrics import value

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
def test_json_that_cannot_be_read_is_a_bad_request(url: str, text: bytes, why: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=text, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert why in error["message"]


def test_no_such_route_and_no_such_method(url: str) -> None:
    missing, refused = httpx.get(f"{url}/v1/nothing"), httpx.get(f"{url}/v1/completions")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_supported")
    assert refused.headers["allow"] == "POST"


def test_what_nobody_thought_of_shows_nothing_of_itself() -> None:
    app = tiny_app()

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("a secret")

    with serving(app) as url:
        answer = httpx.get(f"{url}/broken")
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in answer.text
        assert value(url, "bigmodel_requests_total", outcome="refused_500") == 1
