"""Tests that ask for logs have those of loggers that do not propagate, too; others do not look for such loggers."""

from __future__ import annotations

import logging

import pytest

APART = logging.getLogger("bigmodel.tests.apart")
APART.propagate = False


def test_logs_of_a_logger_that_does_not_propagate_are_caught(caplog: pytest.LogCaptureFixture) -> None:
    APART.warning("heard")
    logging.getLogger("bigmodel.tests").warning("heard, too")
    assert [record.getMessage() for record in caplog.records] == ["heard", "heard, too"]


def test_others_have_handlers_at_the_root_alone() -> None:
    assert not APART.handlers
    assert logging.getLogger().handlers
