"""What goes wrong in a benchmark itself."""

from __future__ import annotations

from bigmodel.errors import BigModelError


class BenchmarkError(BigModelError, RuntimeError):
    """A measurement could not be made, or would not have meant what it says."""


class UsageError(BenchmarkError):
    """The command line cannot be understood."""
