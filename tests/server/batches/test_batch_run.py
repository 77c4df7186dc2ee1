"""The life of a batch: what is answered and kept, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.server.batches.answers import Answered
from bigmodel.server.batches.batch_run import Later
from bigmodel.server.batches.batches import Batches
from bigmodel.server.batches.limits import BatchEndedError, BatchLimits
from bigmodel.server.batches.records import Batch
from tests.server.batches.making import ENDPOINT, kept
from tests.server.batches.running import Route, batches_in, begun, content, current, ended, prompts, texts, until


@pytest.mark.anyio
async def test_every_request_is_answered_a_few_at_once(batches: Batches, route: Route) -> None:
    route.left = 0
    batch = await begun(batches, prompts(*range(20)), "alice")
    await until(lambda: route.running == 3)
    route.left = 1000
    batch = await ended(batches, batch)
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
async def test_until_then_nothing_of_its_owner_is_asked_and_others_go_on(batches: Batches, route: Route) -> None:
    route.first = lambda prompt: Later(60.0) if prompt < 10 else None
    held = await begun(batches, prompts(*range(10)), "alice")
    await until(lambda: bool(route.asked) and not route.running)
    assert (await ended(batches, await begun(batches, prompts(*range(10, 30)), "bob"))).status == "completed"
    assert len([owner for owner, _ in route.asked if owner == "alice"]) <= 3
    assert current(batches, held).status == "in_progress"


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
