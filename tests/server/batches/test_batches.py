"""The life of batches: what is answered and kept, how it ends, and how a later run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from bigmodel.server.batches.answers import Answered
from bigmodel.server.batches.batch_run import Later
from bigmodel.server.batches.batches import Batches
from bigmodel.server.batches.limits import BatchEndedError, BatchLimits, TooManyBatchesError
from bigmodel.server.batches.records import Batch
from tests.server.batches.making import ENDPOINT, answers, kept, line, lines


class Route:
    """Answers with the prompt, counts what is asked, and answers so many requests at most."""

    def __init__(self, answered: int = 1000) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.running = self.most = 0
        self.left = answered
        self.first: Callable[[Any], Answered | Later | None] = lambda prompt: None

    async def __call__(self, owner: str, endpoint: str, body: dict[str, Any], size: int) -> Answered | Later:
        assert endpoint == ENDPOINT
        prompt = body["prompt"]
        self.asked.append((owner, prompt))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            while not self.left:
                await asyncio.sleep(0.001)
            self.left -= 1
            await asyncio.sleep(0)
            return self.first(prompt) or Answered(200, f"req_{prompt}", b'{"text": "%d"}' % prompt)
        finally:
            self.running -= 1


@pytest.fixture
def route() -> Route:
    return Route()


def batches_in(folder: Path | None, route: Route, **options: Any) -> Batches:
    options = {"may_begin": lambda held, model: held < 3, **options}
    return Batches(folder, options.pop("limits", BatchLimits()), route, **options)


@pytest.fixture
async def batches(route: Route, tmp_path: Path) -> AsyncIterator[Batches]:
    made = batches_in(tmp_path / "kept", route)
    made.start()
    yield made
    await made.stop()


def prompts(*numbers: int) -> bytes:
    return lines(*(line(f"name {number}", body={"model": "tiny", "prompt": number}) for number in numbers))


async def begun(batches: Batches, content: bytes, owner: str = "", **fields: Any) -> Batch:
    file = kept(batches.files, content, owner)
    return await batches.create(Batch.new(owner, ENDPOINT, file.id).model_copy(update=fields))


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), 30)


def current(batches: Batches, batch: Batch) -> Batch:
    found = batches.get(batch.owner, batch.id)
    assert found is not None
    return found


async def ended(batches: Batches, batch: Batch) -> Batch:
    await until(lambda: current(batches, batch).ended)
    return current(batches, batch)


def content(batches: Batches, file_id: str | None) -> dict[str, dict[str, Any]]:
    return {} if file_id is None else answers(batches.files.path(file_id).read_bytes())


def texts(batches: Batches, batch: Batch) -> dict[str, str]:
    found = content(batches, batch.output_file_id)
    return {name: each["response"]["body"]["text"] for name, each in found.items()}


@pytest.mark.anyio
async def test_every_request_is_answered_a_few_at_once(batches: Batches, route: Route) -> None:
    batch = await ended(batches, await begun(batches, prompts(*range(20)), "alice"))
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 20, 20, 0)
    assert texts(batches, batch) == {f"name {number}": str(number) for number in range(20)}
    assert (batch.error_file_id, batch.model) == (None, "tiny")
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert None not in times
    assert route.most == 3
    assert {owner for owner, _ in route.asked} == {"alice"}


@pytest.mark.anyio
async def test_requests_that_fail_are_in_a_file_of_their_own(batches: Batches, route: Route) -> None:
    bad = Answered(400, "req_x", b'{"error": {"message": "no"}}')
    route.first = lambda prompt: bad if prompt == 1 else None
    batch = await ended(batches, await begun(batches, prompts(0, 1, 2)))
    assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 1)
    assert texts(batches, batch).keys() == {"name 0", "name 2"}
    error = content(batches, batch.error_file_id)["name 1"]
    assert error["response"] == {"status_code": 400, "request_id": "req_x", "body": {"error": {"message": "no"}}}
    assert error["error"] is None


@pytest.mark.anyio
async def test_a_request_that_there_is_no_place_for_is_asked_again(batches: Batches, route: Route) -> None:
    left = dict.fromkeys(range(4), 2)

    def first(prompt: int) -> Later | None:
        left[prompt] -= 1
        return Later(0.001) if left[prompt] >= 0 else None

    route.first = first
    batch = await ended(batches, await begun(batches, prompts(*left)))
    assert (batch.completed, batch.failed) == (4, 0)
    assert len(route.asked) == 12


@pytest.mark.anyio
async def test_of_a_wrong_input_nothing_is_asked(batches: Batches, route: Route) -> None:
    batch = await ended(batches, await begun(batches, prompts(0) + b"{\n" + prompts(0)))
    assert batch.status == "failed"
    assert [(error.code, error.line) for error in batch.errors] == [
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 3),
    ]
    assert (batch.failed_at is None, batch.total, batch.output_file_id, batch.error_file_id) == (False, 0, None, None)
    assert route.asked == []


@pytest.mark.anyio
async def test_cancelling_gives_up_what_runs_and_keeps_what_is_answered(batches: Batches, route: Route) -> None:
    route.left = 4
    batch = await begun(batches, prompts(*range(10)))
    await until(lambda: current(batches, batch).completed == 4 and route.running == 3)
    before = current(batches, batch)
    cancelling = await batches.cancel(before)
    assert cancelling.status == "cancelling"
    found = await ended(batches, batch)
    assert (found.status, route.running) == ("cancelled", 0)
    assert found.completed == before.completed
    assert found.completed + found.failed == 10
    assert len(texts(batches, found)) == found.completed
    codes = {each["error"]["code"] for each in content(batches, found.error_file_id).values()}
    assert codes == {"batch_cancelled"}
    with pytest.raises(BatchEndedError, match="'cancelled'"):
        await batches.cancel(found)


@pytest.mark.anyio
async def test_a_batch_that_is_cancelled_before_anything_is_asked_has_no_files(batches: Batches, route: Route) -> None:
    batch = await begun(batches, prompts(*range(10)))
    await batches.cancel(batch)
    found = await ended(batches, batch)
    assert (found.status, found.output_file_id, found.error_file_id, route.asked) == ("cancelled", None, None, [])


@pytest.mark.anyio
async def test_at_the_end_of_its_window_a_batch_expires(batches: Batches, route: Route) -> None:
    route.left = 0
    batch = await begun(batches, prompts(*range(10)))
    await until(lambda: route.running == 3)
    run, _ = batches._runs[batch.id]
    run.end("expired")
    found = await ended(batches, batch)
    assert (found.status, found.completed, found.failed) == ("expired", 0, 10)
    assert found.expired_at is not None
    codes = {each["error"]["code"] for each in content(batches, found.error_file_id).values()}
    assert codes == {"batch_expired"}


@pytest.mark.anyio
async def test_a_batch_whose_time_has_passed_is_not_begun(batches: Batches, route: Route) -> None:
    found = await ended(batches, await begun(batches, prompts(0), expires_at=1))
    assert (found.status, route.asked) == ("expired", [])


@pytest.mark.anyio
async def test_a_later_run_answers_what_is_left_and_nothing_twice(route: Route, tmp_path: Path) -> None:
    first = batches_in(tmp_path, route)
    first.start()
    route.left = 5
    batch = await begun(first, prompts(*range(12)), "alice")
    await until(lambda: current(first, batch).completed == 5 and route.running == 3)
    await first.stop()
    answered = current(first, batch)
    assert (answered.status, route.running) == ("in_progress", 0)

    again = Route()
    second = batches_in(tmp_path, again)
    second.start()
    found = await ended(second, batch)
    assert (found.status, found.completed) == ("completed", 12)
    assert texts(second, found) == {f"name {number}": str(number) for number in range(12)}
    assert len(again.asked) == 7
    assert found.in_progress_at == answered.in_progress_at
    await second.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
async def test_every_state_that_a_killed_server_leaves_is_gone_on_with(
    status: Any, route: Route, tmp_path: Path
) -> None:
    first = batches_in(tmp_path, route, may_begin=lambda held, model: False)
    batch = await begun(first, prompts(0, 1))
    await until(lambda: current(first, batch).status == "in_progress")
    await first.stop()
    left = current(first, batch)
    first._tools.batches.save(left.changed(status) if status != "validating" else batch)

    second = batches_in(tmp_path, route)
    second.start()
    found = await ended(second, batch)
    wanted = ("cancelled", 0, 2) if status == "cancelling" else ("completed", 2, 0)
    assert (found.status, found.completed, found.failed) == wanted
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
async def test_a_store_without_a_place_for_the_answers_fails_the_batch(route: Route, tmp_path: Path) -> None:
    content = prompts(*range(20))
    made = batches_in(tmp_path, route, limits=BatchLimits(total_bytes=len(content) + 400))
    made.start()
    batch = await ended(made, await begun(made, content))
    assert (batch.status, [error.code for error in batch.errors]) == ("failed", ["storage_full"])
    assert 0 < batch.completed < 20
    assert len(texts(made, batch)) == batch.completed
    await made.stop()


@pytest.mark.anyio
async def test_an_input_that_is_gone_fails_the_batch(batches: Batches, route: Route) -> None:
    file = kept(batches.files, prompts(0))
    batches.files.path(file.id).unlink()
    batch = await ended(batches, await batches.create(Batch.new("", ENDPOINT, file.id)))
    assert batch.status == "failed"
    assert "No such file" in batch.errors[0].message
    assert str(batches.files.path("")) not in batch.errors[0].message


@pytest.mark.anyio
async def test_what_goes_wrong_inside_fails_the_batch_and_no_other(
    batches: Batches, route: Route, caplog: pytest.LogCaptureFixture
) -> None:
    def first(prompt: int) -> None:
        if prompt == 1:
            raise RuntimeError("secret")

    route.first = first
    bad, good = await begun(batches, prompts(1)), await begun(batches, prompts(2))
    batch = await ended(batches, bad)
    assert (batch.status, batch.errors[0].code) == ("failed", "server_error")
    assert "secret" not in batch.errors[0].message
    assert "secret" in caplog.text
    assert (await ended(batches, good)).status == "completed"


@pytest.mark.anyio
async def test_a_long_batch_does_not_hold_up_another_owners(batches: Batches, route: Route) -> None:
    route.left = 10
    long = await begun(batches, prompts(*range(60)), "alice")
    short = await begun(batches, prompts(1, 2), "bob")
    await until(lambda: not route.left and route.running == 3 and current(batches, short).status != "validating")
    route.left = 8
    assert (await ended(batches, short)).status == "completed"
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
