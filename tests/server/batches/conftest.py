"""Batches that go on until the end of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bigmodel.server.batches.batches import Batches
from tests.server.batches.running import Route, batches_in


@pytest.fixture
def route() -> Route:
    return Route()


@pytest.fixture
async def batches(route: Route, tmp_path: Path) -> AsyncIterator[Batches]:
    made = batches_in(tmp_path / "kept", route)
    made.start()
    yield made
    await made.stop()
