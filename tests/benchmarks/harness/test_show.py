"""A report as text, as CSV, and on a terminal."""

from __future__ import annotations

import csv
import io

import pytest

from bigmodel.benchmarks.harness import Column, Limit, Report, Table
from bigmodel.benchmarks.harness.show import csv_text, format_cell, plain_text, show

REPORT = Report(
    "x",
    "cpu",
    tables=[Table("Times", [Column("variant"), Column("median", "seconds")], [["one", 0.25], ["another", 0.0000125]])],
    limits=[Limit("one over another", 1.5, "<=", 1.05), Limit("bytes", 10, "==", 10, "bytes")],
    notes=["read with care"],
)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "seconds", "1.500 s"),
        (0.25, "seconds", "250.00 ms"),
        (12.5e-6, "seconds", "12.5 us"),
        (1234567, "bytes", "1,234,567"),
        (1.5e9, "rate", "1.50 GB/s"),
        (1.0312, "ratio", "1.031"),
        (-0.0025, "percent", "-0.25 %"),
        (3.0, "count", "3"),
        (None, "seconds", ""),
        ("text", "seconds", "text"),
    ],
)
def test_values_are_shown_in_the_manner_of_their_unit(value: float | str | None, unit: str, text: str) -> None:
    assert format_cell(value, unit) == text


def test_plain_text_is_aligned_and_says_which_limits_are_missed() -> None:
    assert plain_text(REPORT) == (
        "Times\n"
        "variant     median\n"
        "one      250.00 ms\n"
        "another    12.5 us\n"
        "\n"
        "MISSED: one over another: 1.500 (limit <= 1.050)\n"
        "kept: bytes: 10 (limit == 10)\n"
        "note: read with care\n"
    )


def test_csv_holds_raw_values() -> None:
    rows = list(csv.reader(io.StringIO(csv_text(REPORT))))
    assert rows == [["table", "variant", "median"], ["Times", "one", "0.25"], ["Times", "another", "1.25e-05"]]


def test_a_pipe_gets_plain_text_and_a_terminal_a_drawing() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    pipe, terminal = io.StringIO(), Terminal()
    show(REPORT, pipe)
    show(REPORT, terminal)
    assert pipe.getvalue() == plain_text(REPORT)
    assert "250.00 ms" in terminal.getvalue()
    assert "━" in terminal.getvalue()
