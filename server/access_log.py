"""The log of requests without those that a page, a probe or a scraper sends every second."""

from __future__ import annotations

import logging

POLLED = frozenset({"/health", "/ready", "/plan", "/metrics"})


class WithoutPolling(logging.Filter):
    """For uvicorn's access log: lets through what was not polled, what failed, and everything at level debug."""

    def filter(self, record: logging.LogRecord) -> bool:
        _, _, path, _, status = record.args  # type: ignore[misc]  # client, method, path, version, status
        polled = str(path).partition("?")[0] in POLLED and int(status) < 400  # type: ignore[call-overload]
        return not polled or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
