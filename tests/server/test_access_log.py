"""What is asked every second does not fill the log; what a client did, and what failed, is there."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from bigmodel.server.access_log import WithoutPolling


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.getLogger("tests.access")
    made.setLevel(logging.INFO)
    made.addFilter(only := WithoutPolling())
    yield made
    made.removeFilter(only)


def logged(logger: logging.Logger, path: str, status: int) -> bool:
    """Whether a request is in the log, written as uvicorn writes it."""
    arguments = ("127.0.0.1:9", "GET", path, "1.1", status)
    return bool(logger.filter(logger.makeRecord(logger.name, logging.INFO, "", 0, "%s %s %s %s %s", arguments, None)))


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/plan?parts=false"])
def test_polling_is_left_out_unless_it_fails(logger: logging.Logger, path: str) -> None:
    assert not logged(logger, path, 200)
    assert logged(logger, path, 503)


@pytest.mark.parametrize("path", ["/", "/v1/completions", "/v1/models", "/planet"])
def test_what_a_client_did_is_there(logger: logging.Logger, path: str) -> None:
    assert logged(logger, path, 200)


def test_at_level_debug_everything_is_there(logger: logging.Logger) -> None:
    logger.setLevel(logging.DEBUG)
    assert logged(logger, "/health", 200)
