"""A request shows its key and keeps to a size before any route; clients have turns, bounded for each and for all."""

from __future__ import annotations

import asyncio
import logging
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi import FastAPI, Request

from bigmodel.server.http.client_limits import (
    KEY,
    LATER,
    OPEN_PATHS,
    UPLOAD_PATH,
    BodyLimit,
    KeyGuard,
    Shares,
    client_of,
    in_whose_name,
    request_id,
)
from bigmodel.server.http.errors import install
from bigmodel.server.http.internal_calls import post
from bigmodel.server.http.keys import ApiKey, KeyRing
from bigmodel.server.http.run import server_config
from tests.server.live import serving, tiny_app


def ring(*keys: str) -> KeyRing:
    return KeyRing(ApiKey.of(key) for key in keys)


class Refusals:
    """Counts as the server's metrics do."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def refused(self, status: int) -> None:
        self.statuses.append(status)


class Limits:
    body_limit = 100
    upload_limit = 200


class State:
    def __init__(self) -> None:
        self.metrics = Refusals()


@pytest.fixture
def app() -> FastAPI:
    """An application that tells how long the body was."""
    made = FastAPI()
    made.state.server = State()
    install(made)

    @made.post(UPLOAD_PATH)
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
    app.add_middleware(KeyGuard, keys=ring("alpha", "beta"))
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    answer = await send(app, "POST", "/length", headers=headers)
    assert answer.status_code == status
    assert app.state.server.metrics.statuses == ([] if status == 200 else [401])


@pytest.mark.anyio
async def test_a_key_may_have_any_letters(app: FastAPI) -> None:
    app.add_middleware(KeyGuard, keys=ring("schlüssel"))
    answer = await send(app, "POST", "/length", headers={"Authorization": "Bearer schlüssel".encode()})
    assert answer.status_code == 200


@pytest.mark.anyio
async def test_probes_need_no_key(app: FastAPI) -> None:
    app.add_middleware(KeyGuard, keys=ring("alpha"))
    assert "/health" in OPEN_PATHS
    assert (await send(app, "GET", "/health")).json() == "well"


@pytest.mark.anyio
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(("length", "status"), [(100, 200), (101, 413)])
async def test_a_body_may_be_as_long_as_the_limit(app: FastAPI, length: int, status: int, announced: bool) -> None:
    app.add_middleware(BodyLimit, limits=Limits())

    async def pieces():  # type: ignore[no-untyped-def]
        for start in range(0, length, 30):
            yield b"x" * min(30, length - start)

    answer = await send(app, "POST", "/length", content=b"x" * length if announced else pieces())
    assert answer.status_code == status
    assert answer.json() == length if status == 200 else answer.json()["error"]["code"] == "body_too_long"


@pytest.mark.anyio
@pytest.mark.parametrize(("length", "status"), [(101, 200), (200, 200), (201, 413)])
async def test_an_upload_has_a_limit_of_its_own(app: FastAPI, length: int, status: int) -> None:
    app.add_middleware(BodyLimit, limits=Limits())
    assert (await send(app, "POST", UPLOAD_PATH, content=b"x" * length)).status_code == status


@pytest.mark.anyio
@pytest.mark.parametrize(("name", "statuses"), [("alice", [200, 429]), ("gone", [401, 401])])
async def test_the_servers_own_requests_have_the_name_of_a_key_and_leave_it_a_share(
    app: FastAPI, name: str, statuses: list[int]
) -> None:
    guarded = KeyGuard(app, KeyRing([ApiKey.of("secret", "alice", requests=2)]))
    scope = {KEY: name, LATER: 1, "app": app}
    answers = [await post(guarded, "/length", b"x", **scope) for _ in range(2)]
    assert [answer.status for answer in answers] == statuses
    if name == "alice":
        del scope[LATER]
        assert (await post(guarded, "/length", b"x", **scope)).status == 200


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def waiting(shares: Shares, *clients: str) -> tuple[list[str], list[asyncio.Task[None]]]:
    """Let clients wait in this order; those that have begun so far, and their tasks."""
    begun: list[str] = []

    async def wait(client: str) -> None:
        await shares.wait(client)
        begun.append(client)

    tasks = []
    for client in clients:
        tasks.append(asyncio.ensure_future(wait(client)))
        await settle()
    return begun, tasks


@pytest.mark.anyio
async def test_a_client_has_as_many_turns_as_each_may_have() -> None:
    shares = Shares(2, 10)
    assert [shares.take("a") for _ in range(3)] == [True, True, False]
    assert shares.take("b")


@pytest.mark.anyio
async def test_all_together_have_no_more_than_there_are() -> None:
    shares = Shares(2, 3)
    assert [shares.take(client) for client in "aabb"] == [True, True, True, False]


@pytest.mark.anyio
async def test_clients_that_wait_take_turns() -> None:
    shares = Shares(1, 1)
    shares.take("a")
    begun, _ = await waiting(shares, *"aaab")
    for count in range(4):
        shares.give_back("a" if count == 0 else begun[-1])
        await settle()
    assert begun == ["a", "b", "a", "a"]


@pytest.mark.anyio
async def test_nobody_overtakes_itself() -> None:
    shares = Shares(1, 2)
    shares.take("a")
    begun, _ = await waiting(shares, "a")
    assert not shares.take("a")
    assert begun == []
    shares.give_back("a")
    assert not shares.take("a")  # it is the one's that waits
    await settle()
    assert begun == ["a"]


@pytest.mark.anyio
async def test_a_client_that_has_its_share_does_not_keep_others_waiting() -> None:
    shares = Shares(1, 2)
    shares.take("a")
    begun, _ = await waiting(shares, "a", "b")
    assert begun == ["b"]


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.anyio
async def test_a_turn_of_who_no_longer_waits_is_not_lost(granted: bool) -> None:
    shares = Shares(1, 1)
    shares.take("a")
    begun, (gone, _) = await waiting(shares, "b", "c")
    if granted:
        shares.give_back("a")
    gone.cancel()
    await settle()
    if not granted:
        shares.give_back("a")
        await settle()
    assert begun == ["c"]
    shares.give_back("c")
    assert shares.idle


@pytest.mark.anyio
async def test_a_turn_is_wanted_by_those_who_could_have_it() -> None:
    shares = Shares(1, 2)
    shares.take("a")
    _, tasks = await waiting(shares, "a")
    assert [shares.wanted(client) for client in "ab"] == [True, False]
    shares.take("b")
    assert [shares.wanted(client) for client in "ab"] == [True, False]  # "a" has what one may have
    _, more = await waiting(shares, "c")
    assert [shares.wanted(client) for client in "ab"] == [True, True]
    for task in (*tasks, *more):
        task.cancel()
    await settle()
    assert not shares.wanted("a")


@pytest.mark.anyio
async def test_who_has_no_turn_in_time_no_longer_waits() -> None:
    shares = Shares(1, 1)
    shares.take("a")
    with pytest.raises(TimeoutError):
        await shares.wait("b", 0.0)
    shares.give_back("a")
    assert shares.idle


@pytest.mark.anyio
async def test_a_client_is_its_key_or_its_address() -> None:
    assert client_of({"type": "http", "client": ("10.0.0.1", 80)}) == "10.0.0.1"
    assert client_of({"type": "http", "client": ("10.0.0.1", 80), KEY: "alpha"}) == "alpha"
    assert client_of({"type": "http", "client": None}) == ""


def test_the_engine_computes_in_the_name_of_a_key_or_an_address_and_batches_without_a_key_in_nobodys() -> None:
    from_there = {"type": "http", "client": ("10.0.0.1", 80)}
    assert in_whose_name(from_there) == "10.0.0.1"
    assert in_whose_name({**from_there, LATER: 1}) == ""
    assert in_whose_name({**from_there, LATER: 1, KEY: "alpha"}) == "alpha"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/models", "/nowhere", "/v1/messages"])
def test_every_answer_has_the_id_of_its_request(path: str) -> None:
    with serving(tiny_app(api_keys=("alpha",))) as url, httpx.Client(base_url=url) as client:
        own = client.get(path, headers={"x-request-id": "mine-1"})  # no key: 401, too
        assert own.headers["x-request-id"] == "mine-1"
        assert own.headers.get("request-id") == ("mine-1" if path == "/v1/messages" else None)
        wrong = [{"x-request-id": text.encode("latin-1")} for text in ("", "a b", "é", "x" * 200)]
        ids = {client.get(path, headers=each).headers["x-request-id"] for each in wrong}  # type: ignore[arg-type]
        assert len(ids) == 4
        assert all(re.fullmatch("req_[0-9a-f]{32}", one) for one in ids)


@pytest.mark.slow
def test_two_requests_with_one_id_are_both_answered() -> None:
    body = {"model": "tiny", "prompt": ["the cat", "the mat"], "max_tokens": 40, "ignore_eos": True}
    with (
        serving(tiny_app()) as url,
        httpx.Client(base_url=url, headers={"x-request-id": "same"}) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        found = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(4)))
    assert [(one.status_code, one.json()["usage"]["completion_tokens"]) for one in found] == [(200, 80)] * 4


def test_the_access_log_names_requests(capsys: pytest.CaptureFixture[str]) -> None:
    config = server_config(FastAPI(), log_level="info")
    request_id.set("mine-2")
    try:
        logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "POST", "/v1/x", "1.1", 200)
    finally:
        request_id.set("-")
    assert config.log_config is not None
    assert capsys.readouterr().out.rstrip().endswith("mine-2")
