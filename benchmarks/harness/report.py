"""The result of a benchmark: tables, limits with measured values, and the underlying data."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from .measure import QUIET, Samples

Cell: TypeAlias = "str | int | float | None"

_RELATIONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        unit: Unit of its numbers: ``"seconds"``, ``"bytes"`` (exact), ``"rate"`` (bytes per second),
            ``"ratio"``, ``"percent"`` (of 1), ``"count"``, or ``""`` for text.
    """

    name: str
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under named columns; None leaves a cell empty."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def records(self) -> list[dict[str, Cell]]:
        """Return each row by column name."""
        return [dict(zip((column.name for column in self.columns), row)) for row in self.rows]


@dataclass(frozen=True)
class Limit:
    """A bound on a figure.

    Attributes:
        what: Description of the figure.
        measured: Its measured value.
        relation: ``"<="``, ``">="`` or ``"=="``.
        bound: The bound.
        unit: As for `Column`.
    """

    what: str
    measured: float
    relation: str
    bound: float
    unit: str = "ratio"

    @property
    def kept(self) -> bool:
        """Whether the figure keeps the bound."""
        return bool(_RELATIONS[self.relation](self.measured, self.bound))


@dataclass
class Report:
    """The result of one benchmark.

    Attributes:
        name: The benchmark's module.
        device: Its device, as given by ``--device``.
        settings: Sizes and options that the figures depend on.
        tables: The tables.
        limits: The limits.
        notes: Remarks on the interpretation of the figures.
        samples: All measured values, by name of the measurement.
        picture: SVG that is stored with the data; "" for none.
    """

    name: str
    device: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: dict[str, Samples] = field(default_factory=dict)
    picture: str = ""

    @property
    def kept(self) -> bool:
        """Whether every limit is kept."""
        return all(limit.kept for limit in self.limits)

    def to_data(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {
            "name": self.name,
            "device": self.device,
            "settings": dict(self.settings),
            "tables": [
                {"title": table.title, "units": {c.name: c.unit for c in table.columns}, "rows": table.records()}
                for table in self.tables
            ],
            "limits": [{**asdict(limit), "kept": limit.kept} for limit in self.limits],
            "notes": self.notes,
            "samples": {name: asdict(samples) for name, samples in self.samples.items()},
        }


def disturbances(report: Report) -> list[str]:
    """Return sentences about disturbances of the measurements by other processes."""
    notes = []
    thrown = sum(samples.disturbed for samples in report.samples.values())
    if thrown:
        notes.append(f"{thrown} rounds were run again, because other processes took more than {QUIET:.0%} of the cores")
    shares = [share for samples in report.samples.values() for share in samples.neighbours if share > QUIET]
    if shares:
        notes.append(f"in {len(shares)} rounds that count, other processes took up to {max(shares):.0%} of the cores")
    return notes
