"""Batches over a route of a test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigmodel.server.batches.answers import Answered
from bigmodel.server.batches.batch_run import Later
from bigmodel.server.batches.batches import Batches
from bigmodel.server.batches.limits import BatchLimits
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


def batches_in(folder: Path | None, route: Route, **options: Any) -> Batches:
    options = {"may_begin": lambda held, model: held < 3, **options}
    return Batches(folder, options.pop("limits", BatchLimits()), route, **options)


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
