"""One live server over the tiny model for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import serving, tiny_app


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What asynchronous tests run on."""
    return "asyncio"


@pytest.fixture(scope="session")
def app() -> Any:
    return tiny_app()


@pytest.fixture(scope="session")
def url(app: Any) -> Iterator[str]:
    with serving(app) as address:
        yield address
