"""A request that the process ends with does not end every later one: it is asked again alone, and then given up."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from bigmodel.server.batches.batches import Batches
from bigmodel.server.batches.begun import MOST_ENDS, BegunRequests, Quarantine, left_behind
from bigmodel.server.batches.records import Batch
from tests.server.batches.running import Route, batches_in, begun, content, current, ended, prompts, texts, until

DEADLY = 4
"""The request that the process ends with."""


async def killed(folder: Path, number: int, route: Route, batches: Batches) -> Path:
    """What the folder of a process that is killed now has: a copy, as the process of this test goes on."""
    copy = folder.with_name(f"kept {number}")
    shutil.copytree(folder, copy)
    await batches.stop()
    return copy


def deadly() -> Route:
    """A route that never answers one of the requests."""
    route = Route()
    own = route.first

    class Hanging(Route):
        async def __call__(self, owner: str, endpoint: str, body: dict[str, object], size: int) -> object:
            if body["prompt"] == DEADLY:
                self.asked.append((owner, DEADLY))
                self.running += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    self.running -= 1
            return await super().__call__(owner, endpoint, body, size)

    made = Hanging()
    made.first = own
    return made


async def until_it_would_end(route: Route) -> None:
    """Wait until the request is asked, and no other that still can be answered."""
    await until(lambda: any(prompt == DEADLY for _, prompt in route.asked))


@pytest.mark.anyio
async def test_it_is_asked_again_alone_and_then_given_up(tmp_path: Path) -> None:
    folder, batch = tmp_path / "kept", None
    for number in range(MOST_ENDS):
        route = deadly()
        batches = batches_in(folder, route)
        batches.start()
        if batch is None:
            batch = await begun(batches, prompts(*range(10)))
        await until_it_would_end(route)
        if number:  # it was among those that were begun, and nothing else runs beside it
            assert route.most <= 1
            assert route.running == 1
        folder = await killed(folder, number, route, batches)
    route = deadly()
    batches = batches_in(folder, route)
    batches.start()
    assert batch is not None
    found = await ended(batches, batch)
    assert (found.status, found.completed, found.failed) == ("completed", 9, 1)
    assert texts(batches, found).keys() == {f"name {number}" for number in range(10)} - {f"name {DEADLY}"}
    (error,) = content(batches, found.error_file_id).values()
    assert error["custom_id"] == f"name {DEADLY}"
    assert error["error"]["code"] == "server_error"
    assert error["error"]["message"] == "The server ended 3 times while it answered this request."
    assert DEADLY not in [prompt for _, prompt in route.asked]
    await batches.stop()


@pytest.mark.anyio
async def test_other_batches_wait_meanwhile(tmp_path: Path) -> None:
    route = deadly()
    batches = batches_in(tmp_path / "kept", route)
    batches.start()
    await begun(batches, prompts(DEADLY))
    await until_it_would_end(route)
    folder = await killed(tmp_path / "kept", 0, route, batches)
    route = deadly()
    batches = batches_in(folder, route)
    batches.start()
    other = await begun(batches, prompts(*range(100, 105)), "bob")
    await until_it_would_end(route)
    await asyncio.sleep(0.05)
    assert [prompt for _, prompt in route.asked] == [DEADLY]
    (waiting,) = (each for each in batches.of("") if not each.ended)
    await batches.cancel(waiting)
    assert (await ended(batches, other)).completed == 5
    await batches.stop()


@pytest.mark.anyio
async def test_a_server_that_is_stopped_in_order_leaves_nobody_suspected(tmp_path: Path) -> None:
    route = Route(answered=4)
    batches = batches_in(tmp_path / "kept", route)
    batches.start()
    batch = await begun(batches, prompts(*range(10)))
    await until(lambda: current(batches, batch).completed == 4 and route.running == 3)
    await batches.stop()
    assert not left_behind(tmp_path / "kept" / "batches")
    route = Route(answered=0)
    batches = batches_in(tmp_path / "kept", route)
    batches.start()
    await until(lambda: route.running == 3)  # none is asked alone
    route.left = 1000
    assert (await ended(batches, batch)).completed == 10
    await until(lambda: not left_behind(tmp_path / "kept" / "batches"))
    await batches.stop()


def test_what_is_begun_is_counted_and_forgotten(tmp_path: Path) -> None:
    batch = Batch.new("", "/v1/completions", "file-1")
    begun = BegunRequests(tmp_path, batch.id)
    for number in (7, 3, 7):
        begun.add(number)
    with (tmp_path / f"{batch.id}.begun").open("a") as file:
        file.write("12\nx")  # torn
    assert left_behind(tmp_path) == {batch.id}
    again = BegunRequests(tmp_path, batch.id)
    assert again.left == {7: 2, 3: 1, 12: 1}
    again.forget()
    assert not left_behind(tmp_path)
    again.forget()


@pytest.mark.anyio
async def test_a_quarantine_is_over_when_no_batch_is_in_it() -> None:
    await Quarantine(set()).over()
    quarantine = Quarantine({"a", "b"})
    waiting = asyncio.ensure_future(quarantine.over())
    for batch_id in ("c", "a"):
        quarantine.leave(batch_id)
        await asyncio.sleep(0)
        assert not waiting.done()
    quarantine.leave("b")
    await waiting
