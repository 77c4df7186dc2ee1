"""One live server over the tiny model for all tests that do not change it; processes that start quickly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.preloaded import python_executable
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


class Preloaded:
    """Has the name of the module `sys` that starts processes: an interpreter that has imported what they need."""

    @property
    def executable(self) -> str:
        return str(python_executable("xgrammar"))


@pytest.fixture(scope="session", autouse=True)
def preloaded_grammar_workers() -> Iterator[None]:
    """Processes that compile grammars are forked from one that has imported their libraries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bigmodel.server.engine.sampling.grammar_worker.sys", Preloaded())
        yield
