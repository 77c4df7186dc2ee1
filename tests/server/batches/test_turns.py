"""Few requests have a place at once, and their owners take turns."""

from __future__ import annotations

import asyncio

import pytest

from bigmodel.server.batches import turns as turns_module
from bigmodel.server.batches.turns import Turns


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "POLL_SECONDS", 0.001)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def waiting(turns: Turns, owners: str) -> tuple[list[str], list[asyncio.Task[None]]]:
    """Let owners wait in this order; those that have begun so far, and their tasks."""
    begun: list[str] = []

    async def wait(owner: str) -> None:
        await turns.take(owner, None)
        begun.append(owner)

    tasks = [asyncio.ensure_future(wait(owner)) for owner in owners]
    await settle()
    return begun, tasks


@pytest.mark.anyio
async def test_as_many_begin_as_may_and_owners_take_turns() -> None:
    turns = Turns(lambda held, model: held < 2)
    begun, tasks = await waiting(turns, "aaaab")
    assert begun == ["a", "a"]
    turns.give_back()
    await settle()
    turns.give_back()
    await settle()
    assert sorted(begun[2:]) == ["a", "b"]
    turns.give_back()
    await asyncio.gather(*tasks)


@pytest.mark.anyio
async def test_an_owner_whose_model_is_not_there_does_not_hold_up_others() -> None:
    turns = Turns(lambda held, model: model != "gone")
    blocked = asyncio.ensure_future(turns.take("a", "gone"))
    await settle()
    await turns.take("b", "there")
    assert not blocked.done()
    blocked.cancel()


@pytest.mark.anyio
async def test_who_waits_begins_when_it_may_without_anybody_giving_back() -> None:
    may = False
    turns = Turns(lambda held, model: may)
    task = asyncio.ensure_future(turns.take("a", None))
    await asyncio.sleep(0.01)
    assert not task.done()
    may = True
    await asyncio.wait_for(task, 10)


@pytest.mark.anyio
async def test_an_owner_can_be_paused() -> None:
    turns = Turns(lambda held, model: held < 2)
    turns.pause("a", 60.0)
    begun, tasks = await waiting(turns, "ab")
    assert begun == ["b"]
    turns.pause("a", 0.0)
    await asyncio.wait_for(tasks[0], 10)


@pytest.mark.anyio
@pytest.mark.parametrize("granted", [False, True])
async def test_the_place_of_who_no_longer_waits_is_not_lost(granted: bool) -> None:
    turns = Turns(lambda held, model: held < 1)
    await turns.take("x", None)
    begun, (gone, other) = await waiting(turns, "ab")
    if granted:
        turns.give_back()
    gone.cancel()
    if not granted:
        turns.give_back()
    await asyncio.wait_for(other, 10)
    assert begun == ["b"]
