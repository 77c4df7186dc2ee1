"""The key and the size of a body are looked at before any route is."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, Request

from bigmodel.server.http.errors import install
from bigmodel.server.http.middleware import OPEN_PATHS, BodyLimit, KeyGuard


class Refusals:
    """Counts as the server's metrics do."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def refused(self, status: int) -> None:
        self.statuses.append(status)


class State:
    def __init__(self) -> None:
        self.metrics = Refusals()


@pytest.fixture
def app() -> FastAPI:
    """An application that tells how long the body was."""
    made = FastAPI()
    made.state.server = State()
    install(made)

    @made.post("/length")
    async def length(request: Request) -> int:
        return len(await request.body())

    @made.get("/health")
    async def health() -> str:
        return "well"

    return made


async def send(app: FastAPI, method: str, path: str, **options: object) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, **options)  # type: ignore[arg-type]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer alpha", 200),
        ("bearer  beta ", 200),
        ("Bearer gamma", 401),
        ("Bearer", 401),
        ("Basic alpha", 401),
        ("Bearer \xe4lpha", 401),
        (None, 401),
    ],
)
async def test_any_of_the_keys_is_accepted(app: FastAPI, header: str | None, status: int) -> None:
    app.add_middleware(KeyGuard, keys=("alpha", "beta"))
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    answer = await send(app, "POST", "/length", headers=headers)
    assert answer.status_code == status
    assert app.state.server.metrics.statuses == ([] if status == 200 else [401])


@pytest.mark.anyio
async def test_a_key_may_have_any_letters(app: FastAPI) -> None:
    app.add_middleware(KeyGuard, keys=("schlüssel",))
    answer = await send(app, "POST", "/length", headers={"Authorization": "Bearer schlüssel".encode()})
    assert answer.status_code == 200


@pytest.mark.anyio
async def test_probes_need_no_key(app: FastAPI) -> None:
    app.add_middleware(KeyGuard, keys=("alpha",))
    assert "/health" in OPEN_PATHS
    assert (await send(app, "GET", "/health")).json() == "well"


@pytest.mark.anyio
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(("length", "status"), [(100, 200), (101, 413)])
async def test_a_body_may_be_as_long_as_the_limit(app: FastAPI, length: int, status: int, announced: bool) -> None:
    app.add_middleware(BodyLimit, limit=lambda: 100)

    async def pieces():  # type: ignore[no-untyped-def]
        for start in range(0, length, 30):
            yield b"x" * min(30, length - start)

    answer = await send(app, "POST", "/length", content=b"x" * length if announced else pieces())
    assert answer.status_code == status
    assert answer.json() == length if status == 200 else answer.json()["error"]["code"] == "body_too_long"
