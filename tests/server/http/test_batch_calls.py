"""Requests of batches are answered by their routes, in the name of a key, behind what clients wait for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from bigmodel.server.batches.answers import Answered
from bigmodel.server.batches.batch_run import Later
from bigmodel.server.engine.scheduling.request import SamplingParams
from bigmodel.server.http import batch_calls
from bigmodel.server.http.batch_calls import BEHIND, BatchCalls, may_begin
from bigmodel.server.http.client_limits import KEY, LATER
from bigmodel.server.http.engine_requests import make_request
from bigmodel.server.http.state import ServerState, Settings
from bigmodel.server.http.text_bodies import CompletionBody
from bigmodel.server.models.pool import ModelPool
from bigmodel.server.models.served import ServedModel
from tests.server.tiny import Collector


def state(*names: str, **settings: Any) -> ServerState:
    return ServerState(Settings("tiny", **settings), ModelPool([ServedModel(name) for name in names or ("tiny",)]))


def calls(answer: Response, server: ServerState | None = None) -> tuple[BatchCalls, list[Request]]:
    """Calls of an application that always answers the same, and what it is asked."""
    app, asked = FastAPI(), []

    @app.post("/v1/x")
    async def route(http: Request) -> Response:
        await http.body()
        asked.append(http)
        return answer

    return BatchCalls(app, server or state()), asked


@pytest.mark.anyio
async def test_a_request_has_the_key_of_its_batch_and_waits_behind_others() -> None:
    ask, asked = calls(JSONResponse({"a": 1}, headers={"x-request-id": "req_1"}))
    body = {"prompt": "é", "n": 2**70, "x": float("nan")}
    assert await ask("alice", "/v1/x", body, 10) == Answered(200, "req_1", b'{"a":1}')
    assert (asked[0].scope[KEY], asked[0].scope[LATER]) == ("alice", BEHIND)
    sent = json.loads(await asked[0].body())
    assert (sent["prompt"], sent["n"], sent["x"] != sent["x"]) == ("é", 2**70, True)
    await ask("", "/v1/x", body, 10)
    assert KEY not in asked[1].scope


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "headers", "draining", "expected"),
    [
        (429, {"Retry-After": "7"}, False, 7.0),
        (429, {}, False, batch_calls.RETRY_SECONDS),
        (503, {"Retry-After": "2"}, False, 2.0),
        (503, {}, False, None),  # a model that cannot be loaded
        (500, {}, False, None),
        (500, {}, True, batch_calls.RETRY_SECONDS),  # the engine was stopped: a later run answers it
        (503, {}, True, batch_calls.RETRY_SECONDS),
        (400, {}, True, None),
        (504, {}, False, None),
    ],
)
async def test_what_there_is_no_place_for_is_asked_again_later(
    status: int, headers: dict[str, str], draining: bool, expected: float | None
) -> None:
    server = state()
    server.draining = draining
    ask, _ = calls(JSONResponse({}, status, headers=headers), server)
    wanted = Answered(status, "", b"{}") if expected is None else Later(expected)
    assert await ask("", "/v1/x", {}, 2) == wanted


@pytest.mark.anyio
async def test_an_engine_that_fails_has_answered_what_it_computed_and_nothing_else() -> None:
    server = state()
    server.failure = RuntimeError("a step failed")
    assert await calls(JSONResponse({}, 500), server)[0]("", "/v1/x", {}, 2) == Answered(500, "", b"{}")
    assert await calls(JSONResponse({}, 503), server)[0]("", "/v1/x", {}, 2) == Later(batch_calls.RETRY_SECONDS)


@pytest.mark.anyio
async def test_a_stream_is_an_error_of_its_request() -> None:
    ask, asked = calls(JSONResponse({}))
    refused = await ask("", "/v1/x", {"stream": True}, 2)
    assert isinstance(refused, Answered)
    assert (refused.status, json.loads(refused.body)["error"]["param"], asked) == (400, "stream", [])
    assert await ask("", "/v1/x", {"stream": False}, 2) == Answered(200, "", b"{}")


class Engine:
    """Says how many sequences it has, of how many that it may compute at once."""

    def __init__(self, unfinished: int, most: int) -> None:
        self.unfinished = unfinished
        self.healthy = True
        self.idle_since = 0.0
        self.core = SimpleNamespace(scheduler=SimpleNamespace(max_sequences=most))


def running(unfinished: int, most: int) -> Any:
    return SimpleNamespace(engine=Engine(unfinished, most))


@pytest.mark.parametrize(
    ("held", "unfinished", "most", "may"),
    [
        (0, 0, 8, True),
        (3, 3, 8, True),
        (4, 4, 8, False),  # half of the places are for others
        (3, 8, 8, False),  # others would wait for it
        (1, 8, 8, False),
        (0, 99, 8, True),  # but it goes on
        (0, 1, 1, True),
        (1, 1, 1, False),
    ],
)
def test_at_most_half_of_the_places_and_one_while_others_wait(held: int, unfinished: int, most: int, may: bool) -> None:
    server = state()
    server.first.running = running(unfinished, most)
    assert may_begin(server, held, "tiny") is may


def test_nothing_begins_while_the_model_loads_or_the_server_ends() -> None:
    server = state()
    assert not may_begin(server, 0, None)
    server.first.running = running(0, 8)
    assert may_begin(server, 0, None)
    server.draining = True
    assert not may_begin(server, 0, None)


def test_one_of_several_models_is_loaded_for_a_batch_where_nobody_uses_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = state("a", "b")
    server.pool.started = True
    server.first.running = running(1, 8)
    assert not may_begin(server, 0, "b")
    server.first.running.engine.unfinished = 0
    assert not may_begin(server, 0, "b")  # it was used just now
    monkeypatch.setattr(batch_calls, "QUIET_SECONDS", 0.0)
    assert may_begin(server, 0, "b")
    assert not may_begin(server, 1, "b")  # one request has it loaded
    assert may_begin(server, 1, "a")


def test_a_request_of_a_batch_comes_after_all_others_of_its_key() -> None:
    most, least = 2**31 - 1, -(2**31)  # that clients may ask for
    body = CompletionBody(model="tiny", prompt="x", priority=least)
    app = SimpleNamespace(state=SimpleNamespace(server=state()))
    http = Request({"type": "http", "app": app, LATER: BEHIND})
    assert make_request(http, body, [1], SamplingParams(1), Collector()).priority > most
