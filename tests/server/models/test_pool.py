"""Whose turn it is: loads are shared, bounded and cancelled, and no model is kept out by traffic for others."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from bigmodel.errors import BudgetError, ServeError
from bigmodel.server import Loaded, Loading
from bigmodel.server.models.policy import Key
from bigmodel.server.models.pool import LoadFailedError, ModelPool, PoolClosedError, TookTooLongError
from bigmodel.server.models.served import ServedModel

pytestmark = pytest.mark.anyio
BUDGETS: Mapping[Key, int] = {0: 10}


class Fake(ServedModel):
    """A model of some bytes. Its loads take as long as `gate` is closed, and are counted; the first ones may fail."""

    def __init__(self, name: str, size: int = 6, failures: int = 0) -> None:
        super().__init__(name)
        self.size = size
        self.failures = failures
        self.gate = threading.Event()
        self.gate.set()
        self.loads = self.unloads = 0

    def enough(self, budgets: Mapping[Key, int], left: Mapping[Key, int]) -> bool:
        if self.size > budgets[0]:
            raise BudgetError("it fits nowhere")
        return self.size <= left[0]

    def load(self, budgets: Mapping[Key, int], left: Mapping[Key, int], begin: Callable[[], bool]) -> None:
        assert self.size <= left[0]
        self.loads += 1
        while not self.gate.wait(0.001):
            self.loading.report(1, 4)
        if self.loads <= self.failures:
            raise OSError("the disk is gone")
        self.claimed = {0: self.size}
        begin()
        engine: Any = SimpleNamespace(unfinished=0, idle_since=0.0, healthy=False)
        self.running = SimpleNamespace(engine=engine, close=lambda: None)  # type: ignore[assignment]

    def unload(self, running: Any) -> None:
        assert not self.in_use
        self.claimed = {}
        self.unloads += 1


def pool_of(*models: Fake, **options: Any) -> ModelPool:
    made = ModelPool(models, BUDGETS, **options)
    made.started = True  # nothing is loaded at the start
    return made


async def use(pool: ModelPool, model: Fake, seconds: float | None = 60) -> None:
    """Take a lease and give it back."""
    await pool.acquire(model, patience=seconds)
    assert model.usable
    model.leases -= 1


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_requests_at_once_load_a_model_once() -> None:
    model = Fake("a")
    pool = pool_of(model)
    model.gate.clear()
    asked = [asyncio.create_task(use(pool, model)) for _ in range(5)]
    await until(lambda: model.loads == 1)
    asked.append(asyncio.create_task(use(pool, model)))
    await asyncio.sleep(0)
    model.gate.set()
    await asyncio.gather(*asked)
    assert (model.loads, model.leases) == (1, 0)


async def test_two_that_fit_stay_and_otherwise_the_least_recently_used_one_goes() -> None:
    a, b, c = Fake("a", 4), Fake("b", 4), Fake("c", 4)
    pool = pool_of(a, b, c)
    for model in (a, b):
        await use(pool, model)
    assert a.usable
    assert b.usable
    a.last_used, b.last_used = 2, 1
    await use(pool, c)
    assert (a.usable, b.usable, c.usable) == (True, False, True)
    assert (a.unloads, b.unloads) == (0, 1)


@pytest.mark.slow
async def test_a_model_in_use_is_waited_for_and_takes_nothing_new_meanwhile() -> None:
    a, b = Fake("a"), Fake("b")
    pool = pool_of(a, b)
    await pool.acquire(a, patience=60)
    other = asyncio.create_task(use(pool, b))
    await until(lambda: a.closing)
    late = asyncio.create_task(use(pool, a))
    await asyncio.sleep(0.1)
    assert (b.loads, late.done()) == (0, False)
    assert "waiting for a" in b.loading.stage
    a.leases -= 1
    await asyncio.gather(other, late)
    assert (a.loads, b.loads, a.unloads) == (2, 1, 1)


@pytest.mark.slow
async def test_one_that_an_engine_computes_for_is_in_use() -> None:
    a, b = Fake("a"), Fake("b")
    pool = pool_of(a, b)
    await use(pool, a)
    assert a.running is not None
    a.running.engine.unfinished = 1  # type: ignore[misc]
    other = asyncio.create_task(use(pool, b))
    await until(lambda: a.closing)
    await asyncio.sleep(0.1)
    assert not a.unloads
    a.running.engine.unfinished = 0  # type: ignore[misc]
    await other
    assert a.unloads == 1


async def test_those_who_waited_have_a_model_before_it_makes_room_again() -> None:
    """Requests for two models that exclude each other all come through, however they alternate."""
    a, b = Fake("a"), Fake("b")
    pool = pool_of(a, b)
    await asyncio.wait_for(asyncio.gather(*(use(pool, model) for _ in range(20) for model in (a, b))), 60)
    assert a.loads == b.loads == 1


@pytest.mark.slow
async def test_a_wait_is_bounded_and_what_made_room_goes_on() -> None:
    a, b = Fake("a"), Fake("b")
    pool = pool_of(a, b)
    await pool.acquire(a, patience=60)
    late: asyncio.Task[None] | None = None
    with pytest.raises(TookTooLongError, match=r"within 0\.2 s \(waiting for a\)"):
        await asyncio.gather(use(pool, b, 0.2), until(lambda: a.closing))
    late = asyncio.create_task(use(pool, a))
    await late
    assert (a.loads, b.loads, a.unloads, a.closing) == (1, 0, 0, False)


@pytest.mark.slow
async def test_a_load_that_takes_longer_than_requests_wait_goes_on_for_the_next_one() -> None:
    model = Fake("a")
    pool = pool_of(model)
    model.gate.clear()
    for _ in range(2):
        with pytest.raises(TookTooLongError):
            await use(pool, model, 0.1)
    model.gate.set()
    await use(pool, model)
    assert model.loads == 1


async def test_who_leaves_ends_the_load_and_the_next_one_begins_anew() -> None:
    model = Fake("a")
    pool = pool_of(model)
    model.gate.clear()
    asked = asyncio.create_task(use(pool, model))
    await until(lambda: model.loads == 1)
    asked.cancel()
    await until(lambda: not model.bringing)
    assert model.running is None
    model.gate.set()
    await use(pool, model)
    assert model.loads == 2


async def test_a_load_goes_on_for_those_who_stay() -> None:
    model = Fake("a")
    pool = pool_of(model)
    model.gate.clear()
    leaves, stays = (asyncio.create_task(use(pool, model)) for _ in range(2))
    await until(lambda: model.loads == 1)
    leaves.cancel()
    await asyncio.wait({leaves})
    model.gate.set()
    await stays
    assert (model.loads, model.leases) == (1, 0)


async def test_a_lease_that_comes_as_its_request_leaves_is_given_back() -> None:
    model = Fake("a")
    pool = pool_of(model)
    model.gate.clear()
    asked = asyncio.create_task(pool.acquire(model, patience=60))
    await until(lambda: model.loads == 1)
    model.waiters[0].add_done_callback(lambda _: asked.cancel())  # when it is told, and before it runs
    model.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert model.usable
    assert model.leases == 0


async def test_one_that_comes_while_a_load_is_cancelled_has_it_begun_again() -> None:
    model = Fake("a")
    pool = pool_of(model)
    model.gate.clear()
    asked = asyncio.create_task(use(pool, model))
    await until(lambda: model.loads == 1)
    asked.cancel()
    await asyncio.sleep(0)
    late = asyncio.create_task(use(pool, model))
    await until(lambda: model.loads == 2)
    model.gate.set()
    await late


async def test_a_failed_load_is_told_to_its_requests_and_tried_again() -> None:
    a, b = Fake("a", 4), Fake("b", 4, failures=1)
    pool = pool_of(a, b)
    seen: list[BaseException] = []
    pool.on_failure = seen.append
    await use(pool, a)
    found = await asyncio.gather(use(pool, b), use(pool, b), return_exceptions=True)
    assert [str(error) for error in found] == ["the model 'b' could not be loaded (OSError)"] * 2
    assert [str(error) for error in seen] == ["the disk is gone"]
    assert a.usable
    assert not b.claimed
    await use(pool, b)
    assert b.loads == 2


async def test_one_that_fits_nowhere_unloads_nothing() -> None:
    a, b = Fake("a"), Fake("b", 11)
    pool = pool_of(a, b)
    await use(pool, a)
    with pytest.raises(LoadFailedError, match="BudgetError"):
        await use(pool, b)
    assert a.usable


@pytest.mark.slow
async def test_an_unused_model_is_unloaded_after_a_while() -> None:
    a, b = Fake("a", 4), Fake("b", 4)
    pool = pool_of(a, b, keep_alive=0.1)
    await pool.acquire(a, patience=60)
    await use(pool, b)
    a.last_used = 0
    task = asyncio.create_task(pool._unload_unused(0.1))
    await until(lambda: b.unloads == 1)
    assert a.usable  # a request uses it
    a.leases -= 1
    await until(lambda: a.unloads == 1)
    task.cancel()


async def test_a_pool_that_closes_lets_nobody_wait() -> None:
    model = Fake("a")
    pool = pool_of(model)
    pool._loop = asyncio.get_running_loop()
    model.gate.clear()
    asked = asyncio.create_task(use(pool, model))
    await until(lambda: model.loads == 1)
    pool.refuse()
    with pytest.raises(PoolClosedError):
        await asked
    with pytest.raises(PoolClosedError):
        await use(pool, model)
    await pool.close()
    assert not pool.busy


async def test_the_first_model_is_loaded_at_the_start_and_may_fail() -> None:
    for failures in (0, 1):
        model = Fake("a", failures=failures)
        pool = ModelPool([model], BUDGETS)
        assert not pool.started
        pool.start()
        await until(lambda: pool.started)  # noqa: B023
        assert (model.usable, model.leases) == (not failures, 0)
        await pool.close()


class Large:
    """Stands for a model."""


class Breaks(ServedModel):
    """A model that fits, and whose loader raises with what it has loaded so far."""

    def __init__(self) -> None:
        super().__init__("a", self.broken, start=lambda loaded, options: pytest.fail("nothing was loaded"))
        self.loaded: weakref.ref[Large] | None = None

    def enough(self, budgets: Mapping[Key, int], left: Mapping[Key, int]) -> bool:
        return True

    def broken(self, progress: Loading) -> Loaded:
        large = Large()
        self.loaded = weakref.ref(large)
        raise ServeError("no tokenizer")


async def test_what_a_failed_load_had_loaded_is_given_back() -> None:
    model = Breaks()
    errors: list[BaseException] = []
    pool = ModelPool([model], BUDGETS)
    pool.on_failure = errors.append
    with pytest.raises(LoadFailedError):
        await pool.acquire(model, patience=60)
    assert len(errors) == 1  # somebody still has it, with its traceback
    assert model.loaded is not None
    assert model.loaded() is None
