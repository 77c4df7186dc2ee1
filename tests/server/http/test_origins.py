"""Pages of named origins may call the server from a browser, others may not; keys are asked for all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bigmodel.errors import ServeError
from bigmodel.server import EngineOptions, Settings, create_app
from tests.server.live import MODEL, serving
from tests.server.tiny import tiny_model, tiny_tokenizer

PAGE = "https://chat.example.com"
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 1}


def app_with(*origins: str, keys: tuple[str, ...] = ()) -> Any:
    engine = EngineOptions(kv_bytes=16 << 20, max_sequences=2)
    settings = Settings(MODEL, api_keys=keys, engine=engine, allowed_origins=origins)
    return create_app(tiny_model(layers=1), tiny_tokenizer(), settings=settings)


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """A server with a key, for pages of one origin."""
    with serving(app_with(PAGE, keys=("secret",))) as url:
        yield url


def preflight(url: str, origin: str) -> httpx.Response:
    """What a browser asks before a page may send JSON with a key."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return httpx.options(f"{url}/v1/completions", headers={"Origin": origin, **asked})


def test_a_page_of_the_origin_may_send_a_key_and_read_the_answer(guarded: str) -> None:
    allowed = preflight(guarded, PAGE)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
    key = {"Authorization": "Bearer secret"}
    answer = httpx.post(f"{guarded}/v1/completions", json=BODY, headers={"Origin": PAGE, **key})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_a_page_of_the_origin_reads_refusals_too(guarded: str) -> None:
    refused = httpx.post(f"{guarded}/v1/completions", json=BODY, headers={"Origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_pages_of_other_origins_get_nothing(guarded: str) -> None:
    assert preflight(guarded, "https://other.example").status_code == 400
    for headers in ({"Origin": "https://other.example"}, {}):
        assert "access-control-allow-origin" not in httpx.get(f"{guarded}/health", headers=headers).headers


def test_by_default_no_page_may(url: str) -> None:
    assert preflight(url, PAGE).status_code == 405
    assert "access-control-allow-origin" not in httpx.get(f"{url}/health", headers={"Origin": PAGE}).headers


@pytest.mark.slow
def test_a_star_stands_for_all() -> None:
    with serving(app_with("*")) as url:
        for origin in (PAGE, "null"):
            assert httpx.get(f"{url}/health", headers={"Origin": origin}).headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    "origin", ["", "chat.example.com", "https://a.example/", "https://a.example/chat", "https://*"]
)
def test_what_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ServeError, match="is no origin; give one as https"):
        Settings(MODEL, allowed_origins=(origin,))


def test_what_browsers_send_is_taken() -> None:
    Settings(MODEL, allowed_origins=("*", "null", PAGE, "http://localhost:3000", "http://[::1]:80", "app://-"))
