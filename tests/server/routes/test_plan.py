"""GET /plan: one server's view, or that of all replicas together and each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx

from bigmodel.server.fleet import Fleet
from bigmodel.server.replica_board import Board, Word
from bigmodel.server.view import view
from tests.server.live import MODEL, serving, tiny_app


def test_one_server_shows_its_devices_and_its_engine(url: str) -> None:
    shown = httpx.get(f"{url}/plan").json()
    assert (shown["model"], shown["plan"], shown["replicas"]) == (MODEL, None, [])
    assert [device["device"] for device in shown["devices"]] == ["cpu"]
    assert shown["engine"]["state"] == "running"


def test_who_asks_every_second_may_leave_the_plans_out() -> None:
    app = tiny_app()
    app.state.server.plan = SimpleNamespace(to_json=lambda: '{"parts": []}', devices={})
    with serving(app) as url:
        assert httpx.get(f"{url}/plan").json()["plan"] == {"parts": []}
        assert httpx.get(f"{url}/plan?parts=false").json()["plan"] is None


def test_replicas_are_shown_together_and_each() -> None:
    board, app = Board(), tiny_app()
    state: Any = app.state.server
    with serving(app) as url:
        board.put("other", Word("", view(state)))
        state.fleet = Fleet(lambda: Word("", view(state)), board, "this")
        shown = httpx.get(f"{url}/plan").json()
    assert [each["name"] for each in shown["replicas"]] == ["other", "this"]
    assert shown["engine"]["max_sequences"] == 2 * shown["replicas"][0]["engine"]["max_sequences"]
