"""A report on the screen: drawn on a terminal, plain in a pipe, or as CSV."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from typing import TextIO

from .report import Cell, Limit, Report, Table


def show(report: Report, stream: TextIO | None = None) -> None:
    """Print tables, limits and notes to `stream` (None: stdout)."""
    target = sys.stdout if stream is None else stream
    if target.isatty():
        _draw(report, target)
    else:
        target.write(plain_text(report))


def plain_text(report: Report) -> str:
    """Return the report as aligned text."""
    parts = [_plain_table(table) for table in report.tables]
    lines = [limit_line(limit) for limit in report.limits] + [f"note: {note}" for note in report.notes]
    return "\n\n".join([*parts, *(["\n".join(lines)] if lines else [])]) + "\n"


def csv_text(report: Report) -> str:
    """Return all tables as CSV: title and headings of each table, then raw values, one row per line."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    for table in report.tables:
        writer.writerow(["table", *(column.name for column in table.columns)])
        writer.writerows([table.title, *row] for row in table.rows)
    return target.getvalue()


def limit_line(limit: Limit) -> str:
    """Return one limit as a line."""
    measured, bound = format_cell(limit.measured, limit.unit), format_cell(limit.bound, limit.unit)
    return f"{'kept' if limit.kept else 'MISSED'}: {limit.what}: {measured} (limit {limit.relation} {bound})"


def format_cell(value: Cell, unit: str) -> str:
    """Return a value as text, formatted by its unit."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if unit == "seconds":
        return _seconds(float(value))
    if unit == "rate":
        return f"{value / 1e9:.2f} GB/s"
    if unit == "ratio":
        return f"{value:.3f}"
    if unit == "percent":
        return f"{100 * value:+.2f} %"
    if unit in ("bytes", "count"):
        return f"{int(value):,}"
    return f"{value:g}"


def _seconds(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.2f} ms" if magnitude >= 1e-3 else f"{value * 1e6:.1f} us"


def _texts(table: Table) -> list[list[str]]:
    return [[format_cell(cell, column.unit) for cell, column in zip(row, table.columns)] for row in table.rows]


def _plain_table(table: Table) -> str:
    heads = [column.name for column in table.columns]
    texts = _texts(table)
    widths = [max(map(len, column)) for column in zip(heads, *texts)]
    rows = [_plain_row(heads, widths, table), *(_plain_row(row, widths, table) for row in texts)]
    return "\n".join([table.title, *rows])


def _plain_row(row: Sequence[str], widths: Sequence[int], table: Table) -> str:
    cells = [
        text.rjust(width) if column.unit else text.ljust(width)
        for text, width, column in zip(row, widths, table.columns)
    ]
    return "  ".join(cells).rstrip()


def _draw(report: Report, target: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    console = Console(file=target)
    for table in report.tables:
        drawn = Drawn(title=table.title, title_justify="left")
        for column in table.columns:
            drawn.add_column(Text(column.name), justify="right" if column.unit else "left")
        for row in _texts(table):
            drawn.add_row(*(Text(cell) for cell in row))
        console.print(drawn)
    for limit in report.limits:
        console.print(Text(limit_line(limit), style="green" if limit.kept else "red"))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))
