"""The files and batches of a server: what routes ask, and the tasks that run batches beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path

from bigmodel.server.batches.batch_run import Answer, BatchRun, BatchTools
from bigmodel.server.batches.batch_store import BatchStore
from bigmodel.server.batches.begun import Quarantine, left_behind
from bigmodel.server.batches.file_store import FileStore
from bigmodel.server.batches.folder import BatchFolder
from bigmodel.server.batches.limits import BatchEndedError, BatchLimits
from bigmodel.server.batches.records import Batch
from bigmodel.server.batches.turns import Turns


class Batches:
    """The files and batches of a server.

    Args:
        folder: Where they are; None for a folder that goes with the server, and is made when it is first needed.
        limits: Their bounds.
        answer: What answers the requests of batches.
        may_begin: Whether another request of a model may begin beside so many.
        check_bounds: Raises ValueError for a line that would take too long to parse.
        knows: Whether there is an owner of this name: batches of others wait until there is.

    Raises:
        ServeError: The folder cannot be used, or another server uses it.
    """

    def __init__(
        self,
        folder: Path | None,
        limits: BatchLimits,
        answer: Answer,
        *,
        may_begin: Callable[[int, str | None], bool],
        check_bounds: Callable[[bytes], None] = lambda line: None,
        knows: Callable[[str], bool] = lambda owner: True,
    ) -> None:
        self.limits = limits
        self._given = folder
        self._answer = answer
        self._may_begin = may_begin
        self._check_bounds = check_bounds
        self._knows = knows
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        if folder is not None:
            self._tools  # noqa: B018  # the error is one of the start

    @cached_property
    def _folder(self) -> BatchFolder:
        return BatchFolder(self._given)

    @cached_property
    def _tools(self) -> BatchTools:
        files = FileStore(self._folder.files, self.limits)
        batches = BatchStore(self._folder.batches, self.limits)
        files.in_use = batches.uses
        files.delete_unknown({each for batch in batches.unfinished() for each in (batch.output_id, batch.error_id)})
        return BatchTools(
            files,
            batches,
            self._answer,
            Turns(self._may_begin),
            self._check_bounds,
            ThreadPoolExecutor(1, "bigmodel-batches"),
            asyncio.Lock(),
            Quarantine(self._left(batches)),
        )

    def _left(self, batches: BatchStore) -> set[str]:
        """The batches that go on, and that an earlier process ended with."""
        going_on = {batch.id for batch in batches.unfinished() if self._knows(batch.owner)}
        return left_behind(batches.folder) & going_on

    @property
    def files(self) -> FileStore:
        """The files."""
        return self._tools.files

    def start(self) -> None:
        """Go on with the batches of an earlier run; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        if self._given is not None:
            for batch in self._tools.batches.unfinished():
                if self._knows(batch.owner):
                    self._begin(batch)

    async def stop(self) -> None:
        """Leave all batches as they are, for a later run, and close the folder. Idempotent."""
        self.leave()
        if self._runs:
            await asyncio.wait([task for _, task in self._runs.values()])
        if "_tools" in self.__dict__:
            await asyncio.to_thread(self._tools.writer.shutdown)
            await asyncio.to_thread(self._folder.close)

    def leave(self) -> None:
        """Give up what is being answered: the server is about to end. Called in the event loop."""
        self._stopped = True
        for run, _ in self._runs.values():
            run.end("stopped")

    def leave_soon(self) -> None:
        """Call `leave` in the event loop. From any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.leave)

    # --- what routes ask --------------------------------------------------------------------------------

    def get(self, owner: str, batch_id: str) -> Batch | None:
        """The batch of this id, if this owner has one."""
        return self._tools.batches.get(owner, batch_id)

    def of(self, owner: str) -> list[Batch]:
        """The batches of an owner, the oldest first."""
        return self._tools.batches.of(owner)

    async def create(self, batch: Batch) -> Batch:
        """Begin a new batch. Raises TooManyBatchesError where too many have not ended."""
        tools = self._tools
        forgotten = tools.batches.add(batch)
        try:
            await tools.written(partial(tools.batches.save, batch))
        except BaseException:
            tools.batches.drop(batch.id)
            raise
        for old in forgotten:
            await tools.written(partial(tools.batches.forget, old))
        self._begin(batch)
        return batch

    async def cancel(self, batch: Batch) -> Batch:
        """End a batch before its time. Raises BatchEndedError where it has ended, or is about to."""
        tools = self._tools
        if batch.status not in ("validating", "in_progress", "cancelling"):
            raise BatchEndedError(f"a batch with the status '{batch.status}' cannot be cancelled")
        cancelling = batch.changed("cancelling")
        tools.batches.put(cancelling)
        if batch.id in self._runs:
            self._runs[batch.id][0].end("cancelled")
        await tools.written(partial(tools.batches.save, cancelling))
        return cancelling

    def _begin(self, batch: Batch) -> None:
        if self._stopped:
            return
        run = BatchRun(batch.id, self._tools)
        task = asyncio.ensure_future(run.run())
        self._runs[batch.id] = run, task
        task.add_done_callback(lambda _: self._runs.pop(batch.id, None))
