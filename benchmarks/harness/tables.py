"""The table of most benchmarks: one row per variant, compared with a baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .measure import SECONDS, Samples
from .report import Cell, Column, Table


def comparison_table(
    title: str,
    samples: Samples,
    baseline: str,
    figure: str = SECONDS,
    unit: str = "seconds",
    extra: Sequence[tuple[Column, Callable[[str], Cell]]] = (),
) -> Table:
    """Return medians and quartiles of one figure for every variant, best first, and ratios to `baseline`.

    Args:
        title: Title of the table.
        samples: The measured values.
        baseline: The variant that the others are compared with.
        figure: The figure to show.
        unit: Its unit, as for `Column`.
        extra: Further columns, each computed from the variant's name.
    """
    columns = [
        Column("variant"),
        Column("median", unit),
        Column("first quartile", unit),
        Column("third quartile", unit),
        Column(f"over {baseline}", "ratio"),
        Column("ratio q1", "ratio"),
        Column("ratio q3", "ratio"),
        Column("runs", "count"),
        *(column for column, _ in extra),
    ]
    rows: list[list[Cell]] = []
    for name, figures in samples.values.items():
        if figure not in figures:
            continue
        one, over = samples.summary(name, figure), samples.ratio(name, baseline, figure)
        cells: list[Cell] = [name, one.median, one.first_quartile, one.third_quartile]
        cells += [over.median, over.first_quartile, over.third_quartile, one.count]
        rows.append(cells + [compute(name) for _, compute in extra])
    return Table(title, columns, sorted(rows, key=lambda row: float(row[1] or 0), reverse=unit == "rate"))
