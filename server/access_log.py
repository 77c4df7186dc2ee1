"""The log of requests without those that a page, a probe or a scraper sends every second."""

from __future__ import annotations

import logging
from typing import cast

POLLED = frozenset({"/health", "/ready", "/plan", "/metrics"})


class WithoutPolling(logging.Filter):
    """For uvicorn's access log: lets through what was not polled, what failed, and everything at level debug."""

    def filter(self, record: logging.LogRecord) -> bool:
        _client, _method, path, _version, status = cast(tuple[str, str, str, str, int], record.args)
        polled = path.partition("?")[0] in POLLED and status < 400
        return not polled or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
