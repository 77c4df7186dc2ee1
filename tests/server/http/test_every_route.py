"""What every route that takes a body shares: keys, bounds, and what is refused is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bigmodel.server.http.fields import BODIES
from tests.server.http.test_fields import GOOD, OF_MODELS
from tests.server.live import MODEL, serving, tiny_app

MORE = ["/v2/rerank", "/rerank"]
PATHS = [*BODIES, *MORE]
KEY = {"authorization": "Bearer right"}


@pytest.fixture(scope="module")
def guarded_app() -> Any:
    return tiny_app(api_keys=("right",), max_body_bytes=100_000)


@pytest.fixture(scope="module")
def guarded(guarded_app: Any) -> Iterator[str]:
    with serving(guarded_app) as url:
        yield url


def ask(url: str, path: str, **fields: Any) -> httpx.Response:
    good = GOOD.get(path) or GOOD["/v1/rerank"]
    model = {"model": MODEL} if path in (*OF_MODELS, *MORE) else {}
    return httpx.post(f"{url}{path}", json={**good, **model, **fields}, headers=KEY)


def refused(app: Any, status: int) -> float:
    """Requests that were refused with a status, as the metrics say."""
    registry = app.state.server.metrics.registry
    return registry.get_sample_value("bigmodel_requests_total", {"outcome": f"refused_{status}"}) or 0.0


@pytest.mark.parametrize("path", PATHS)
def test_a_key_is_needed(guarded: str, guarded_app: Any, path: str) -> None:
    before = refused(guarded_app, 401)
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
        assert httpx.post(f"{guarded}{path}", json={}, headers=headers).status_code == 401
    assert refused(guarded_app, 401) == before + 3


@pytest.mark.parametrize("path", PATHS)
def test_bodies_are_bounded(guarded: str, guarded_app: Any, path: str) -> None:
    before = refused(guarded_app, 413)
    assert ask(guarded, path, user="x" * 100_001).status_code == 413
    assert refused(guarded_app, 413) == before + 1


@pytest.mark.parametrize("path", [*OF_MODELS, *MORE])
def test_an_unknown_field_and_another_model_are_refused_and_counted(guarded: str, guarded_app: Any, path: str) -> None:
    before = refused(guarded_app, 400), refused(guarded_app, 404)
    for fields, status, named in (({"frobnicate": 1}, 400, "frobnicate"), ({"model": "other"}, 404, "other")):
        answer = ask(guarded, path, **fields)
        assert (answer.status_code, named in answer.text) == (status, True)
    assert (refused(guarded_app, 400), refused(guarded_app, 404)) == (before[0] + 1, before[1] + 1)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_server_that_shuts_down_takes_nothing_more(path: str) -> None:
    app = tiny_app()
    with serving(app) as url:
        app.state.server.draining = True
        answer = ask(url, path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
