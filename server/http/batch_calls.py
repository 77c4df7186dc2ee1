"""How requests of batches are answered: by their own routes, in the name of a key, behind what clients wait for."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.types import ASGIApp

from bigmodel.server.batches.answers import Answered
from bigmodel.server.batches.batch_run import Later
from bigmodel.server.batches.batches import Batches
from bigmodel.server.batches.limits import BatchLimits
from bigmodel.server.http.client_limits import KEY, LATER
from bigmodel.server.http.errors import bad_value
from bigmodel.server.http.internal_calls import InternalAnswer, post
from bigmodel.server.http.json_bounds import VALUES, check_bounds
from bigmodel.server.http.parsing import off_loop
from bigmodel.server.http.state import BODY_BYTES_PER_TOKEN, MOST_BODY_BYTES, ServerState

BEHIND = 1 << 33
"""Added to the priority of a request: more than any two that clients give differ by."""

RETRY_SECONDS = 5.0
"""When a request is tried again that cannot be answered now, and no answer says when."""

QUIET_SECONDS = 10.0
"""How long other models must have been unused before a batch has one of several loaded."""


def batches_of(app: ASGIApp, state: ServerState) -> Batches:
    """The files and batches of an application. Raises ServeError where their folder cannot be used."""
    settings = state.settings
    return Batches(
        settings.batch_folder,
        BatchLimits(total_bytes=settings.batch_folder_bytes, share=0.5 if len(settings.named_keys) > 1 else 1.0),
        BatchCalls(app, state),
        may_begin=partial(may_begin, state),
        check_bounds=partial(check_bounds, values=_MOST_VALUES, string_bytes=_MOST_STRING),
        knows=lambda owner: owner == "" if not state.keys else state.keys.named(owner) is not None,
    )


_MOST_VALUES = VALUES + MOST_BODY_BYTES // BODY_BYTES_PER_TOKEN
_MOST_STRING = BatchLimits.line_bytes  # a route knows better, and refuses the one request


def may_begin(state: ServerState, held: int, model: str | None) -> bool:
    """Whether another request of a batch may begin beside those that have a place.

    They have at most half of what an engine computes at once, and none that somebody else waits for, but one: a batch
    goes on slowly beside clients that ask all the time. A model is loaded for a batch where nobody uses the others.
    """
    if state.loading or state.draining or state.failed:
        return False
    if state.several or state.settings.keep_alive is not None:
        asked = {**state.adapters, **state.models}.get(model or state.first.name)
        if asked is not None and not asked.usable:
            others = [served for served in state.models.values() if served is not asked and served.running is not None]
            quiet = time.monotonic() - QUIET_SECONDS
            return not held and not any(served.in_use or served.idle_since > quiet for served in others)
    if not held:
        return True
    engines = [served.running.engine for served in state.models.values() if served.running and served.usable]
    most = max((engine.core.scheduler.max_sequences for engine in engines), default=1)
    free = all(engine.unfinished < engine.core.scheduler.max_sequences for engine in engines)
    return free and held < max(1, most // 2)


class BatchCalls:
    """Answers requests of batches through the application."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, owner: str, endpoint: str, body: dict[str, Any], size: int) -> Answered | Later:
        """Answer a request of so many bytes, or say when to try again."""
        if body.get("stream") is True:
            error = bad_value("stream", "the answers of a batch are not streamed; leave it out")
            return Answered(error.status, f"req_{uuid.uuid4().hex}", to_json(error.body))
        scope = {LATER: BEHIND, **({KEY: owner} if owner else {})}
        content = await off_loop(size, lambda: to_json(body, inf_nan_mode="constants"))
        answer = await post(self._app, endpoint, content, **scope)
        seconds = self._seconds_until_another_try(answer)
        if seconds is not None:
            return Later(seconds)
        return Answered(answer.status, answer.headers.get("x-request-id", ""), answer.body)

    def _seconds_until_another_try(self, answer: InternalAnswer) -> float | None:
        """When to try again what was not answered for lack of a place, a model or time; None for an answer."""
        # What fails with an engine is answered with that: a later run must not fail with it again.
        ending = (answer.status >= 500 and self._state.draining) or (answer.status == 503 and self._state.failed)
        waits = answer.status == 429 or (answer.status == 503 and "retry-after" in answer.headers)
        if not (ending or waits):
            return None
        given = answer.headers.get("retry-after", "")
        return float(given) if given.isdecimal() else RETRY_SECONDS
