"""GET routes: health, readiness, models, plan, metrics, the page."""

from __future__ import annotations

import base64
import hashlib
import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bigmodel.server import Loaded, Loading, Settings, create_app
from bigmodel.server.http.state import ServerState
from tests.server.live import MODEL, serving, tiny_app

ALIVE, LOADING = (200, "ok"), (503, "loading")
DRAINING, FAILED = (503, "draining"), (503, "failed")


def never(progress: Loading) -> Loaded:
    raise AssertionError("an application that is not started loads nothing")


async def statuses(app: Any) -> list[tuple[int, str]]:
    """Status code and status of /health and /ready, of an application that is not started."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        answers = [await client.get(route) for route in ("/health", "/ready")]
    return [(answer.status_code, answer.json()["status"]) for answer in answers]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [ALIVE, LOADING]),
        ({"draining": True}, [ALIVE, DRAINING]),
        ({"failure": OSError("the disk is gone")}, [FAILED, FAILED]),
    ],
)
async def test_routes_before_the_engine_exists(changes: dict[str, Any], expected: list[tuple[int, str]]) -> None:
    app = create_app(loader=never, settings=Settings("tiny"))
    app.state.server = ServerState(Settings("tiny"), **changes)
    assert await statuses(app) == expected


@pytest.mark.anyio
async def test_readiness_fails_if_the_engine_does_not_run() -> None:
    assert await statuses(tiny_app()) == [FAILED, FAILED]


def test_a_running_engine_takes_requests_and_head_is_answered_too(url: str) -> None:
    for route, said in (("health", "ok"), ("ready", "ready")):
        answer = httpx.get(f"{url}/{route}")
        assert (answer.status_code, answer.json()) == (200, {"status": said})
        assert httpx.head(f"{url}/{route}").status_code == 200


def test_the_model_is_listed_and_found(url: str) -> None:
    listed = httpx.get(f"{url}/v1/models").json()
    assert listed["object"] == "list"
    (entry,) = listed["data"]
    assert entry == httpx.get(f"{url}/v1/models/{MODEL}").json()
    assert (entry["id"], entry["object"], entry["owned_by"]) == (MODEL, "model", "bigmodel")
    assert entry["max_model_len"] == 1024


@pytest.mark.parametrize("name", ["other", "other/one"])
def test_any_other_name_is_404(url: str, name: str) -> None:
    answer = httpx.get(f"{url}/v1/models/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert f"'{name}'" in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_while_the_model_loads_its_name_is_known_and_its_length_is_not() -> None:
    def never(progress: Loading) -> Loaded:
        raise AssertionError("an application that is not started loads nothing")

    app = create_app(loader=never, settings=Settings("owner/name"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        entry = (await client.get("/v1/models/owner/name")).json()
    assert entry["id"] == "owner/name"
    assert "max_model_len" not in entry


def test_one_server_shows_its_devices_and_its_engine(url: str) -> None:
    shown = httpx.get(f"{url}/plan").json()
    assert (shown["model"], shown["plan"], shown["replicas"]) == (MODEL, None, [])
    assert [device["device"] for device in shown["devices"]] == ["cpu"]
    assert shown["engine"]["state"] == "running"


@pytest.mark.slow
def test_the_status_can_omit_plans() -> None:
    app = tiny_app()
    app.state.server.first.running.plan = SimpleNamespace(to_json=lambda: '{"parts": []}', devices={})
    with serving(app) as url:
        assert httpx.get(f"{url}/plan").json()["plan"] == {"parts": []}
        assert httpx.get(f"{url}/plan?parts=false").json()["plan"] is None


def test_metrics_are_prometheus_text(url: str) -> None:
    answer = httpx.get(f"{url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {"bigmodel_requests", "bigmodel_generated_tokens", "bigmodel_running_sequences"} <= names


def test_the_content_security_policy_allows_only_the_pages_own_script(url: str) -> None:
    answer = httpx.get(url)
    assert answer.headers["content-type"].startswith("text/html")
    (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_answers_head(url: str) -> None:
    answer = httpx.head(url)
    assert (answer.status_code, answer.content) == (200, b"")
