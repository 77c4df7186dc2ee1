"""Messages of libraries about themselves are dropped; all others are logged."""

from __future__ import annotations

import logging

import pytest

from bigmodel.cli.log_filters import filter_library_logs


@pytest.mark.parametrize(
    ("logger", "noise"),
    [
        ("torchao", "Failed to load /some/kernels.so: Could not load this library"),
        ("torch.utils._pytree", "Calling register_constant() on Enum subclasses is deprecated"),
    ],
)
def test_known_messages_are_dropped_and_others_are_not(
    logger: str, noise: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = logging.getLogger(logger)
    before = list(source.filters)
    filter_library_logs()
    filter_library_logs()
    assert len(source.filters) <= len(before) + 1
    # Given to the filters themselves: torch's loggers do not propagate to caplog.
    records = [source.makeRecord(logger, logging.WARNING, "", 0, text, (), None) for text in (noise, "a real warning")]
    assert [bool(source.filter(record)) for record in records] == [False, True]
    source.filters = before
