"""The server asks itself as a client would, without a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from bigmodel.server.http.internal_calls import post


@pytest.fixture
def app() -> FastAPI:
    made = FastAPI()

    @made.post("/echo")
    async def echo(http: Request) -> Response:
        answer = {"body": await http.json(), "mark": http.scope.get("mark"), "client": http.client and http.client.host}
        return JSONResponse(answer, 201, headers={"x-told": "yes"})

    @made.post("/fails")
    async def fails() -> None:
        raise RuntimeError("secret")

    return made


@pytest.mark.anyio
async def test_the_answer_is_that_of_the_route(app: FastAPI) -> None:
    answer = await post(app, "/echo", b'{"a": 1}', mark="here")
    assert (answer.status, answer.headers["x-told"]) == (201, "yes")
    assert answer.body == b'{"body":{"a":1},"mark":"here","client":"bigmodel"}'


@pytest.mark.anyio
async def test_a_route_that_fails_has_answered(app: FastAPI) -> None:
    answer = await post(app, "/fails", b"{}")
    assert answer.status == 500
    assert b"secret" not in answer.body


@pytest.mark.anyio
async def test_an_application_that_raises_instead_of_answering_is_an_error() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("nothing was sent")

    with pytest.raises(RuntimeError, match="nothing was sent"):
        await post(broken, "/x", b"")


@pytest.mark.anyio
async def test_the_client_stays_until_the_call_is_cancelled() -> None:
    left: list[str] = []

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        try:
            await receive()
        except asyncio.CancelledError:
            left.append("cancelled")
            raise

    call = asyncio.ensure_future(post(waits, "/x", b""))
    await asyncio.sleep(0.01)
    assert not call.done()
    call.cancel()
    await asyncio.wait({call})
    assert left == ["cancelled"]
