"""The life of one batch: validating, in progress, finalizing, completed; or failed, cancelled, expired."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from bigmodel.errors import ServeError
from bigmodel.server.batches.answers import Answered, AnswerFiles
from bigmodel.server.batches.batch_store import BatchStore
from bigmodel.server.batches.begun import MOST_ENDS, BegunRequests, Quarantine
from bigmodel.server.batches.file_store import FileStore
from bigmodel.server.batches.limits import StoreFullError
from bigmodel.server.batches.lines import CheckedInput, check_input
from bigmodel.server.batches.records import Batch, InputError, Status
from bigmodel.server.batches.turns import Turns

logger = logging.getLogger(__name__)

T = TypeVar("T")

WORKERS = 256
"""Requests of a batch that wait for a place at once."""

SMALL_BYTES = 16 << 10
"""A request of so many bytes is read in the event loop."""

Ending = Literal["cancelled", "expired"]

_MISSING: dict[Ending, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
}


@dataclass(frozen=True)
class Later:
    """A request is not answered now, but may be after so many seconds."""

    seconds: float


class Answer(Protocol):
    """Answers a request in the name of the owner of its batch."""

    async def __call__(self, owner: str, endpoint: str, body: dict[str, Any], size: int, /) -> Answered | Later: ...


@dataclass(frozen=True)
class BatchTools:
    """What all batches share.

    Attributes:
        files: Inputs and answers.
        batches: Their records.
        answer: What answers requests.
        turns: Places of requests.
        check_bounds: Raises ValueError for a line that would take too long to parse.
        writer: A thread that writes to the folder, in the order of what it is given.
        checking: Held while an input is checked.
        quarantine: Of requests that an earlier process may have ended with.
    """

    files: FileStore
    batches: BatchStore
    answer: Answer
    turns: Turns
    check_bounds: Callable[[bytes], None]
    writer: Executor
    checking: asyncio.Lock
    quarantine: Quarantine

    async def written(self, function: Callable[[], T]) -> T:
        """Return what a function returns that writes to the folder. It is called also where nobody waits for it."""
        writing = asyncio.get_running_loop().run_in_executor(self.writer, function)
        writing.add_done_callback(lambda done: done.exception())  # seen, also where nobody waits
        await asyncio.wait({writing})  # which does not cancel it
        return writing.result()


class BatchRun:
    """Runs a batch to its end, from where an earlier run has left it.

    Args:
        batch_id: The batch.
        tools: What it shares with others.
    """

    def __init__(self, batch_id: str, tools: BatchTools) -> None:
        self._id = batch_id
        self._tools = tools
        self._ending: Ending | Literal["stopped"] | None = None
        self._work: asyncio.Task[None] | None = None
        self._requests: CheckedInput | None = None
        self._answers: AnswerFiles | None = None
        self._begun: BegunRequests | None = None

    @property
    def batch(self) -> Batch:
        """Its record."""
        return self._tools.batches[self._id]

    def end(self, why: Ending | Literal["stopped"]) -> None:
        """End it before its time: what is being answered is given up at once. Called in the event loop."""
        if self._ending is None or why == "stopped":
            self._ending = why
            if self._work is not None:
                self._work.cancel()

    async def run(self) -> None:
        """Run it. What goes wrong is an error of the batch."""
        if self.batch.status == "cancelling":
            self._ending = "cancelled"
        assert self.batch.expires_at is not None
        left = max(0.0, self.batch.expires_at - time.time())
        expiry = asyncio.get_running_loop().call_later(left, self.end, "expired")
        try:
            error = await self._worked() if self._ending is None else None
            if self._ending != "stopped":
                await self._finish(self._ending, error)
        except Exception:
            logger.exception("%s could not be ended; the next start of the server tries again", self._id)
        finally:
            expiry.cancel()
            self._tools.quarantine.leave(self._id)
            if self._begun is not None:
                await self._tools.written(self._begun.forget)
            if self._answers is not None:
                await self._tools.written(self._answers.close)

    async def _worked(self) -> BaseException | None:
        """Check its input and answer it, until that is done or given up; returns what went wrong."""
        self._work = asyncio.ensure_future(self._answer_all())
        await asyncio.wait({self._work})
        return None if self._work.cancelled() else self._work.exception()

    # --- validating, in progress ------------------------------------------------------------------------

    async def _answer_all(self) -> None:
        requests = await self._check()
        if requests.errors:
            return
        if self.batch.in_progress_at is None:
            await self._change("in_progress", total=len(requests), model=requests.model)
        answers = await self._open_answers()
        await self._answer_left(requests, answers)
        await self._tools.quarantine.over()
        todo = (number for number in range(len(requests)) if number not in answers.done)
        workers = [asyncio.ensure_future(self._answer_each(todo)) for _ in range(min(WORKERS, len(requests)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    async def _answer_left(self, requests: CheckedInput, answers: AnswerFiles) -> None:
        """Answer the requests that an earlier process may have ended with, each alone."""
        tools, begun = self._tools, self._begun
        assert begun is not None
        for number, ends in sorted(begun.left.items()):
            if number >= len(requests) or number in answers.done:
                continue
            custom_id = requests.read(number).custom_id
            async with tools.quarantine.alone:
                if ends < MOST_ENDS:
                    logger.warning("%s: the process ended during '%s'; it is asked again, alone", self._id, custom_id)
                    await self._answer_one(number)
                    continue
                logger.error("%s: the process ended %d times during '%s'; it has failed", self._id, ends, custom_id)
                why = f"The server ended {ends} times while it answered this request."
                await tools.written(partial(answers.add_error, number, custom_id, "server_error", why))
                self._count()
        tools.quarantine.leave(self._id)

    async def _check(self, *, until_ended: bool = True) -> CheckedInput:
        """Read the input. Raises CheckStoppedError where the batch is ended meanwhile, if that is to end it."""
        tools, batch = self._tools, self.batch
        check = partial(
            check_input,
            tools.files.path(batch.input_file_id),
            batch.endpoint,
            tools.files.limits,
            check_bounds=tools.check_bounds,
            stopped=lambda: until_ended and self._ending is not None,
        )
        async with tools.checking:
            self._requests = await asyncio.to_thread(check)
        return self._requests

    async def _open_answers(self) -> AnswerFiles:
        """Begin the files of answers, or go on with them."""
        if self._answers is None:
            tools, batch = self._tools, self.batch

            def opened() -> None:  # nobody may wait for it any more, and then it is asked for again
                self._begun = self._begun or BegunRequests(tools.batches.folder, batch.id)
                self._answers = self._answers or AnswerFiles(tools.files, batch)

            await tools.written(opened)
            self._count()
        assert self._answers is not None
        return self._answers

    async def _answer_each(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._answer_one(number)

    async def _answer_one(self, number: int) -> None:
        tools, batch, requests, answers = self._tools, self.batch, self._requests, self._answers
        assert requests is not None
        assert answers is not None
        assert self._begun is not None
        begun, is_begun = partial(self._begun.add, number), False
        size = requests.size(number)
        read = partial(requests.read, number)
        found: Answered | Later = Later(0.0)
        while isinstance(found, Later):
            await tools.turns.take(batch.owner, batch.model)
            try:
                request = read() if size <= SMALL_BYTES else await asyncio.to_thread(read)
                if not is_begun:
                    await tools.written(begun)
                    is_begun = True
                found = await tools.answer(batch.owner, batch.endpoint, request.body, size)
                if isinstance(found, Later):
                    tools.turns.pause(batch.owner, found.seconds)
            finally:
                tools.turns.give_back()
        await tools.written(partial(answers.add, number, request.custom_id, found))
        self._count()

    def _count(self) -> None:
        """Bring the counts of the record up to date, in memory."""
        assert self._answers is not None
        answers = self._answers
        counts = {"completed": answers.completed, "failed": answers.failed, "usage": answers.usage}
        self._tools.batches.put(self.batch.changed(**counts))

    # --- the end ----------------------------------------------------------------------------------------

    async def _finish(self, ending: Ending | None, error: BaseException | None) -> None:
        """Show the answers, and say how it ended."""
        try:
            if ending is None and error is not None:
                raise error
            if ending is not None and self.batch.in_progress_at is None:
                await self._change(ending)  # before anything was answered
                return
            requests = self._requests or await self._check(until_ended=False)
            if requests.errors:
                await self._change("failed", errors=tuple(requests.errors))
                return
            answers = await self._open_answers()
            if ending is None:
                await self._change("finalizing")
            else:
                await self._tools.written(partial(answers.add_missing, requests, *_MISSING[ending]))
        except Exception as found:
            await self._fail(found)
            return
        await self._publish()
        await self._change(ending or "completed")

    async def _fail(self, error: Exception) -> None:
        """End it with an error; what is answered is shown."""
        if not isinstance(error, (ServeError, OSError)):
            logger.error("%s failed", self._id, exc_info=error)
        code = "server_error" if not isinstance(error, (StoreFullError, OSError)) else "storage_full"
        why = str(error) if isinstance(error, ServeError) else "internal error; the server's log says more"
        if isinstance(error, OSError):
            logger.error("%s: %s", self._id, error)
            why = f"the server cannot read or write its files: {error.strerror}"
        if self._answers is not None:
            await self._publish()
        await self._change("failed", errors=(InputError(code=code, message=why),))

    async def _publish(self) -> None:
        """Make the answers files of the owner."""
        answers = self._answers
        assert answers is not None
        self._count()
        self._answers = None
        shown = await self._tools.written(answers.publish)
        self._tools.batches.put(self.batch.changed(None, **shown))

    async def _change(self, status: Status, **fields: Any) -> None:
        """Give it another state, which is in its record on disk afterwards."""
        batch = self.batch.changed(status, **fields)
        self._tools.batches.put(batch)
        await self._tools.written(partial(self._tools.batches.save, batch))
        counts = f"{batch.completed} of {batch.total} succeeded, {batch.failed} failed"
        logger.info("%s of %s: %s; %s", batch.id, batch.owner or "anybody", status.replace("_", " "), counts)
