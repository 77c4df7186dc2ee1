"""Batches beside each other, in folders that outlive a server: what a later one goes on with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bigmodel.server.batches import records
from bigmodel.server.batches.batches import Batches
from bigmodel.server.batches.limits import BatchLimits, TooManyBatchesError
from tests.server.batches.running import Route, batches_in, begun, current, ended, prompts, texts, until


@pytest.mark.anyio
async def test_a_later_run_answers_what_is_left_and_nothing_twice(
    route: Route, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = batches_in(tmp_path, route)
    first.start()
    route.left = 5
    batch = await begun(first, prompts(*range(12)), "alice")
    await until(lambda: current(first, batch).completed == 5 and route.running == 3)
    await first.stop()
    answered = current(first, batch)
    assert (answered.status, route.running) == ("in_progress", 0)

    later = records.now() + 9
    monkeypatch.setattr(records, "now", lambda: later)
    again = Route()
    second = batches_in(tmp_path, again)
    second.start()
    found = await ended(second, batch)
    assert (found.status, found.completed) == ("completed", 12)
    assert texts(second, found) == {f"name {number}": str(number) for number in range(12)}
    assert len(again.asked) == 7
    assert (found.in_progress_at, found.completed_at) == (answered.in_progress_at, later)
    await second.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
async def test_every_state_that_a_killed_server_leaves_is_gone_on_with(
    status: Any, route: Route, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = batches_in(tmp_path, route, may_begin=lambda held, model: False)
    batch = await begun(first, prompts(0, 1))
    await until(lambda: current(first, batch).status == "in_progress")
    await first.stop()
    left = current(first, batch)
    first._tools.batches.save(left.changed(status) if status != "validating" else batch)
    later = records.now() + 9
    monkeypatch.setattr(records, "now", lambda: later)

    second = batches_in(tmp_path, route)
    second.start()
    found = await ended(second, batch)
    wanted = ("cancelled", 0, 2) if status == "cancelling" else ("completed", 2, 0)
    assert (found.status, found.completed, found.failed) == wanted
    assert found.in_progress_at == (later if status == "validating" else left.in_progress_at)
    await second.stop()


@pytest.mark.anyio
async def test_batches_of_a_key_that_is_no_more_wait_for_it(route: Route, tmp_path: Path) -> None:
    first = batches_in(tmp_path, route, may_begin=lambda held, model: False)
    batch = await begun(first, prompts(0), "alice")
    await first.stop()
    second = batches_in(tmp_path, route, knows=lambda owner: owner == "bob")
    second.start()
    await asyncio.sleep(0.02)
    assert route.asked == []
    await second.stop()
    third = batches_in(tmp_path, route)
    third.start()
    assert (await ended(third, batch)).status == "completed"
    await third.stop()


@pytest.mark.anyio
async def test_a_long_batch_does_not_hold_up_another_owners(batches: Batches, route: Route) -> None:
    route.left = 10
    long = await begun(batches, prompts(*range(60)), "alice")
    short = await begun(batches, prompts(1, 2), "bob")
    while not current(batches, short).ended:
        route.left += 1
        await asyncio.sleep(0.005)
    assert not current(batches, long).ended
    route.left = 1000
    assert (await ended(batches, long)).completed == 60


@pytest.mark.anyio
async def test_so_many_batches_are_unfinished_at_most_and_old_ones_are_forgotten(route: Route, tmp_path: Path) -> None:
    made = batches_in(tmp_path, route, limits=BatchLimits(batches=3, unfinished=2))
    made.start()
    route.left = 0
    held = [await begun(made, prompts(0)) for _ in range(2)]
    with pytest.raises(TooManyBatchesError):
        await begun(made, prompts(0))
    route.left = 1000
    for batch in held:
        await ended(made, batch)
    for _ in range(2):
        await ended(made, await begun(made, prompts(0)))
    assert len(made.of("")) == 3
    assert made.get("", held[0].id) is None
    await made.stop()
    assert len(batches_in(tmp_path, route).of("")) == 3


@pytest.mark.anyio
async def test_without_a_folder_everything_goes_with_the_server(route: Route) -> None:
    made = batches_in(None, route)
    made.start()
    batch = await ended(made, await begun(made, prompts(0)))
    path = made.files.path(batch.output_id)
    assert path.exists()
    await made.stop()
    assert not path.parent.exists()
