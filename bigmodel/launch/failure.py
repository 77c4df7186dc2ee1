"""The error of a process that a launcher started. In a module of its own, since it imports torch's launcher."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..errors import LaunchError


class ProcessFailedError(LaunchError, ChildFailedError):
    """A process failed. Both a `LaunchError` and torch's own error, which callers of accelerate's launcher expect.

    Attributes:
        name, failures: as torch says them: what ran, and what came of it by rank.
    """

    def __init__(self, failed: ChildFailedError) -> None:
        rank, failure = failed.get_first_failure()
        Exception.__init__(self, f"Process {rank} failed:\n{_traceback(failure)}")
        self.name, self.failures = failed.name, failed.failures


def _traceback(failure: Any) -> str:
    data = failure.error_file_data
    message = data.get("message", {}) if isinstance(data, dict) else {}
    info = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return str(info.get("py_callstack") or failure.message)
