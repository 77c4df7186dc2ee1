"""One /metrics and one /plan for all replicas: each reports to a shared board, and any of them answers for all.

Reports of other replicas are at most :data:`PERIOD` seconds old.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from bigmodel.server.http.state import Reporter
from bigmodel.server.replicas.merge import merge_metrics, merge_views

logger = logging.getLogger(__name__)

PERIOD = 0.5  # seconds between two reports of a replica
_SILENCE = 10.0  # seconds without a report after which a replica counts as gone


@dataclass(frozen=True)
class ReplicaReport:
    """State of one replica: its metrics in the format of Prometheus, and its body of GET /plan."""

    metrics: str
    view: dict[str, Any]


class ReportBoard:
    """The last report of each replica, by name. Lives in one process of the cluster; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, ReplicaReport]] = {}

    def put(self, replica: str, report: ReplicaReport) -> None:
        """Replace the report of ``replica``."""
        self._last[replica] = (self._clock(), report)

    def reports(self) -> tuple[dict[str, ReplicaReport], dict[str, ReplicaReport]]:
        """Reports of live replicas, and the last ones of those that are gone."""
        since = self._clock() - _SILENCE
        live = {name: report for name, (at, report) in self._last.items() if at >= since}
        gone = {name: report for name, (at, report) in self._last.items() if at < since}
        return live, gone


class BoardLike(Protocol):
    """A :class:`ReportBoard`, here or in another process."""

    def put(self, replica: str, report: ReplicaReport) -> object: ...

    def reports(self) -> tuple[dict[str, ReplicaReport], dict[str, ReplicaReport]]: ...


class Fleet:
    """The :class:`bigmodel.server.http.state.Reporter` of one of several replicas; ``own`` reports itself alone."""

    def __init__(self, own: Reporter, board: BoardLike, name: str | None = None) -> None:
        self._own = own
        self._board = board
        self._name = name or uuid.uuid4().hex[:8]

    def start(self) -> None:
        """Report this replica to the board from now on, while its process lives."""
        threading.Thread(target=self._keep_reporting, name="bigmodel-fleet", daemon=True).start()

    def metrics(self) -> bytes:
        """Metrics of all replicas together, in the format of Prometheus."""
        live, gone = self._reports()
        return merge_metrics([report.metrics for report in live.values()], [report.metrics for report in gone.values()])

    def plan(self, model: str | None = None) -> dict[str, Any]:
        """The body of GET /plan: totals of the live replicas, and each under ``replicas`` with its name and machine."""
        live, _ = self._reports()
        each = [{"name": name, **live[name].view} for name in sorted(live)]
        return {**self._own.plan(), **merge_views(each), "replicas": each}

    def _reports(self) -> tuple[dict[str, ReplicaReport], dict[str, ReplicaReport]]:
        self._report()  # so that its own numbers are current
        return self._board.reports()

    def _report(self) -> None:
        view = {key: value for key, value in self._own.plan().items() if key not in ("model", "replicas")}
        report = ReplicaReport(self._own.metrics().decode(), {"machine": socket.gethostname(), **view})
        self._board.put(self._name, report)

    def _keep_reporting(self) -> None:
        while True:
            try:
                self._report()
            except Exception:  # one report is missed; without later ones this replica would count as gone
                logger.exception("replica %s could not report", self._name)
            time.sleep(PERIOD)
