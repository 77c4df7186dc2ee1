"""The models of a server in memory: loaded when a request asks for them, unloaded when others need their memory.

All of it is decided in the event loop; what takes long is done in threads of its own. One model is loaded or unloaded
at a time. Requests that asked for a model while it was loaded all get it before another may take its place, and those
for a model that is about to make room wait behind it: no model is kept out by traffic for others.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, TypeVar

from bigmodel.errors import BigModelError, ServeError
from bigmodel.server.loading import Loading, LoadingCancelledError
from bigmodel.server.models.garbage import collect, exemptions
from bigmodel.server.models.policy import Key, LoadedShare, left_of, to_unload
from bigmodel.server.models.running import RunningModel, forget_frames
from bigmodel.server.models.served import ServedModel

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 0.05
"""How often a load that waits for requests on other models looks whether they are done."""

PATIENCE = 5.0
"""Seconds that a cancelled load has to end."""


class NotLoadedError(ServeError):
    """A model that a request asked for is not there."""


class LoadFailedError(NotLoadedError):
    """It could not be loaded. The next request tries again."""


class TookTooLongError(NotLoadedError):
    """It was not loaded in time."""


class PoolClosedError(NotLoadedError):
    """The server is shutting down."""


class _NobodyWaitsError(Exception):
    """Those who waited for a model while others were in use have given up."""


class ModelPool:
    """Loads and unloads the models of a server.

    Args:
        models: The models; the first is loaded at the start.
        budgets: Bytes of each device for all of them together; empty where none is planned with them.
        patience: Seconds that a request waits for its model at most.
        keep_alive: Seconds without requests after which a model is unloaded; None: never.

    Attributes:
        on_loaded: Called in the loading thread when a model is loaded, before its first request.
        on_unloaded: Called in that thread when the memory of one was given back.
        on_failure: Called with what a load raised, in the event loop.
        started: Whether the first model was loaded, or has failed to.
    """

    def __init__(
        self,
        models: Seq[ServedModel],
        budgets: Mapping[Key, int] | None = None,
        *,
        patience: float = 0.0,
        keep_alive: float | None = None,
    ) -> None:
        self.models = {served.name: served for served in models}
        self.first = models[0]
        self.budgets = budgets or {}
        self.patience = patience
        self.keep_alive = keep_alive
        self.on_loaded: Callable[[], None] = lambda: None
        self.on_unloaded: Callable[[], None] = lambda: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.started = self.first.running is not None
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a model is being loaded or unloaded."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def running(self) -> list[RunningModel]:
        """The models that are loaded now."""
        return [served.running for served in self.models.values() if served.running is not None]

    # --- the server's -----------------------------------------------------------------------------

    def start(self) -> None:
        """Load the first model in the background, or start its engine if it is there; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        if self.first.running is not None:
            self.first.running.engine.start()
        else:
            self._begin(self._load_first())
        if self.keep_alive is not None:
            self._begin(self._unload_unused(self.keep_alive))

    def refuse(self) -> None:
        """Load nothing more, and fail the requests that wait for a model. From any thread."""
        self._closed = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._refuse)

    async def close(self) -> None:
        """End loads that are under way, within :data:`PATIENCE`, and all engines."""
        self._closed = True
        self._refuse()
        for task in self._tasks:
            task.cancel()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, PATIENCE)
        for running in self.running:
            await asyncio.to_thread(running.close)

    def _refuse(self) -> None:
        for served in self.models.values():
            served.loading.cancelled = True
            self._tell(served, PoolClosedError("the server is shutting down"))

    async def _load_first(self) -> None:
        try:
            await self.acquire(self.first, patience=None)
        except NotLoadedError:
            pass  # it was logged where it failed
        else:
            self.first.leases -= 1
        finally:
            self.started = True

    async def _unload_unused(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(min(1.0, seconds / 4))
            for served in self.models.values():
                if _unused(served, seconds):
                    async with self._turn:
                        if _unused(served, seconds):  # it may have been used while another was loaded
                            await self._unload_or_log(served)

    async def _unload_or_log(self, served: ServedModel) -> None:
        try:
            await self._unload(served)
        except Exception:  # the other models are still looked after
            logger.exception("%s: unloading failed", served.name)

    # --- requests' ---------------------------------------------------------------------------------

    async def acquire(self, served: ServedModel, *, patience: float | None) -> None:
        """Wait until a model is loaded, and take a lease of it: `ServedModel.leases` is one more.

        A load is cancelled when the last one leaves that waits for it. It goes on where the wait was too long: it may
        be asked for again.

        Args:
            served: The model.
            patience: Seconds to wait at most; None: as long as it takes.

        Raises:
            LoadFailedError: It could not be loaded.
            TookTooLongError: It is not there in time.
            PoolClosedError: The server is shutting down.
        """
        if self._closed:
            raise PoolClosedError("the server is shutting down")
        waiter = asyncio.get_running_loop().create_future()
        served.waiters.append(waiter)
        self._bring(served)
        try:
            await asyncio.wait({waiter}, timeout=patience)
            if not waiter.done():
                raise TookTooLongError(f"the model was not loaded within {patience:g} s ({served.loading.stage})")
            waiter.result()
        except asyncio.CancelledError:
            if waiter.done() and waiter.exception() is None:
                served.leases -= 1  # it came, and nobody is there to use it
            elif served.waiters == [waiter]:
                served.loading.cancelled = True
            raise
        finally:
            if waiter in served.waiters:
                served.waiters.remove(waiter)

    def _bring(self, served: ServedModel) -> None:
        """Have a model loaded when it is its turn, once for all that wait for it."""
        if not served.bringing and not self._closed:
            served.bringing = True
            served.loading = Loading(again=served.longest > 0)
            self._begin(self._load_in_turn(served))

    async def _load_in_turn(self, served: ServedModel) -> None:
        error: NotLoadedError | None = None
        async with self._turn:
            try:
                if served.waiters and not served.usable:
                    await self._load(served)
            except (LoadingCancelledError, _NobodyWaitsError):
                pass
            except asyncio.CancelledError:
                raise
            except BaseException as raised:  # loaders may raise anything
                self._report(served, raised)
                kind = type(raised).__name__
                error = LoadFailedError(f"the model '{served.name}' could not be loaded ({kind})")
            served.bringing = False
            # Before another has its turn: those who waited for the model have it before it may make room.
            self._tell(served, error)

    def _tell(self, served: ServedModel, error: NotLoadedError | None) -> None:
        """Answer those who wait for a model: with a lease of it, or an error; if it is not there, have it loaded."""
        if error is None and not served.usable:
            if served.waiters:  # they came while a load was cancelled
                self._bring(served)
            return
        waiters, served.waiters = served.waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                served.leases += 1
                waiter.set_result(None)
            else:
                waiter.set_exception(type(error)(*error.args))

    def _report(self, served: ServedModel, error: BaseException) -> None:
        # Our own errors need no traceback; the caller of a server with one model reports them.
        own = isinstance(error, BigModelError)
        if len(self.models) == 1:
            logger.error("loading failed", exc_info=None if own else error)
        else:
            logger.error("%s: loading failed: %s", served.name, error, exc_info=None if own else error)
        self.on_failure(error)

    # --- loading and unloading, in turn -------------------------------------------------------------

    async def _load(self, served: ServedModel) -> None:
        if self.budgets:
            await self._make_room(served)
        left = left_of(self.budgets, self._shares())

        def begin() -> bool:
            self.on_loaded()
            return not self._closed

        def load() -> None:
            made = exemptions()
            try:
                served.load(self.budgets, left, begin)
            except BaseException as error:
                forget_frames(error)  # they hold what was loaded so far
                collect(made)
                served.claimed = {}
                raise

        await self._in_thread(load)
        running = served.running
        if running is not None and running.engine.healthy:
            core = running.engine.core
            logger.info(
                "%sready: %d sequences at once, %d tokens each",
                "" if len(self.models) == 1 else f"{served.name}: ",
                core.scheduler.max_sequences,
                core.max_length,
            )

    async def _make_room(self, served: ServedModel) -> None:
        """Unload what has to be, once no request uses it; not where nobody waits for that any more."""
        served.loading.begin("planning")
        shares = self._shares()
        enough = partial(served.enough, self.budgets)
        names = await self._in_thread(lambda: to_unload(self.budgets, shares, enough))
        going = [self.models[name] for name in names]
        for other in going:
            other.closing = True
        try:
            while any(other.in_use for other in going):
                served.loading.begin(f"waiting for {', '.join(other.name for other in going if other.in_use)}")
                await asyncio.sleep(LOOK_SECONDS)
                if not served.waiters:
                    raise _NobodyWaitsError
            for other in going:
                served.loading.begin(f"unloading {other.name}")
                await self._unload(other)
        finally:
            for other in going:
                other.closing = False

    def _shares(self) -> list[LoadedShare]:
        return [served.share for served in self.models.values() if served.claimed]

    async def _unload(self, served: ServedModel) -> None:
        running, served.running = served.running, None
        if running is None:
            return

        def unload() -> None:
            served.unload(running)
            self.on_unloaded()

        await self._in_thread(unload)
        logger.info("%s: unloaded", served.name)

    # --- tasks and threads --------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread that does not keep the process from ending: a download cannot be interrupted."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            if not done.done():
                if error is None:
                    done.set_result(result)  # type: ignore[arg-type]
                else:
                    done.set_exception(error)

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:
                error = raised
            if not loop.is_closed():  # else nobody waits for it
                loop.call_soon_threadsafe(finish, result, error)

        self._thread = threading.Thread(target=run, name="bigmodel-loader", daemon=True)
        self._thread.start()
        return await done


def _unused(served: ServedModel, seconds: float) -> bool:
    return served.usable and not served.in_use and time.monotonic() - served.idle_since >= seconds
