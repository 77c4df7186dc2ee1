"""Turns of clients: bounded for each and for all, client by client, and never lost."""

from __future__ import annotations

import asyncio

import pytest

from bigmodel.server.http.shares import KEY, Shares, client_of

pytestmark = pytest.mark.anyio


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


async def test_a_client_has_as_many_turns_as_each_may_have() -> None:
    shares = Shares(2, 10)
    assert [shares.take("a") for _ in range(3)] == [True, True, False]
    assert shares.take("b")


async def test_all_together_have_no_more_than_there_are() -> None:
    shares = Shares(2, 3)
    assert [shares.take(client) for client in "aabb"] == [True, True, True, False]


async def test_clients_that_wait_take_turns() -> None:
    shares = Shares(1, 1)
    shares.take("a")
    begun, _ = await waiting(shares, *"aaab")
    for count in range(4):
        shares.give_back("a" if count == 0 else begun[-1])
        await settle()
    assert begun == ["a", "b", "a", "a"]


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


async def test_a_client_that_has_its_share_does_not_keep_others_waiting() -> None:
    shares = Shares(1, 2)
    shares.take("a")
    begun, _ = await waiting(shares, "a", "b")
    assert begun == ["b"]


@pytest.mark.parametrize("granted", [False, True])
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


async def test_who_has_no_turn_in_time_no_longer_waits() -> None:
    shares = Shares(1, 1)
    shares.take("a")
    with pytest.raises(TimeoutError):
        await shares.wait("b", 0.0)
    shares.give_back("a")
    assert shares.idle


async def test_a_client_is_its_key_or_its_address() -> None:
    assert client_of({"type": "http", "client": ("10.0.0.1", 80)}) == "10.0.0.1"
    assert client_of({"type": "http", "client": ("10.0.0.1", 80), KEY: "alpha"}) == "alpha"
    assert client_of({"type": "http", "client": None}) == ""
