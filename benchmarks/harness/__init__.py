"""Shared code of benchmarks: interleaved rounds, summaries, reports, and results stored as data."""

from __future__ import annotations

from .clock import elapsed
from .errors import BenchmarkError, UsageError
from .isolate import run_isolated
from .machine import describe_machine, device_slug
from .measure import Samples, Variant, measure
from .report import Column, Limit, Report, Table
from .store import save_report
from .summary import Summary, quartiles, ratio, summarise
from .tables import comparison_table

__all__ = [
    "BenchmarkError",
    "Column",
    "Limit",
    "Report",
    "Samples",
    "Summary",
    "Table",
    "UsageError",
    "Variant",
    "comparison_table",
    "describe_machine",
    "device_slug",
    "elapsed",
    "measure",
    "quartiles",
    "ratio",
    "run_isolated",
    "save_report",
    "summarise",
]
