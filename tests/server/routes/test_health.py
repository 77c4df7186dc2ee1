"""Alive and ready are two things: a server that loads or drains is alive, one whose engine failed is neither."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from bigmodel.server import Loaded, Loading, Settings, create_app
from bigmodel.server.state import ServerState
from tests.server.live import tiny_app

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
async def test_before_there_is_an_engine(changes: dict[str, Any], expected: list[tuple[int, str]]) -> None:
    app = create_app(loader=never, settings=Settings("tiny"))
    app.state.server = ServerState(Settings("tiny"), **changes)
    assert await statuses(app) == expected


@pytest.mark.anyio
async def test_an_engine_that_does_not_run_takes_nothing() -> None:
    assert await statuses(tiny_app()) == [FAILED, FAILED]


def test_a_running_engine_takes_requests_and_head_is_answered_too(url: str) -> None:
    for route, said in (("health", "ok"), ("ready", "ready")):
        answer = httpx.get(f"{url}/{route}")
        assert (answer.status_code, answer.json()) == (200, {"status": said})
        assert httpx.head(f"{url}/{route}").status_code == 200
