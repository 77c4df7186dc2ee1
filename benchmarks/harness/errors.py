"""Errors of benchmarks."""

from __future__ import annotations

from bigmodel.errors import BigModelError


class BenchmarkError(BigModelError, RuntimeError):
    """A measurement could not be made, or would be invalid."""


class UsageError(BenchmarkError):
    """The command line is invalid."""
