"""The table of the zoo: what the architectures did on each placement, kept in the guide.

    python -m tests.zoo.table FOLDER RESULT.json

reads what the tests have kept in FOLDER, writes it as a result that the guide shows, and prints it.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from .kept import KEPT
from .placements import DTYPES, PLACEMENTS, Examined

UNITS = {
    "placement": "", "dtype": "", "models": "count", "outputs equal": "count", "within plan and budget": "count",
    "weights restored": "count", "nothing unknown": "count", "least measured / planned": "ratio",
    "median measured / planned": "ratio",
}  # fmt: skip


def keep(folder: str | None, name: str, dtype: str, found: Mapping[str, Examined] | str) -> None:
    """Write what one architecture did on every placement, or why it has no tiny model; nothing without a folder."""
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    kept = (
        {"skipped": found}
        if isinstance(found, str)
        else {
            placement: {**asdict(each), "problems": each.problems, "kept": each.kept, "ratio": each.ratio}
            for placement, each in found.items()
        }
    )
    path = Path(folder) / f"{name}-{dtype}.json"
    unfinished = path.with_suffix(".part")  # a run may be ended at any time
    unfinished.write_text(json.dumps(kept, indent=1) + "\n")
    unfinished.replace(path)


def problems_kept(folder: str | None, name: str, dtype: str) -> dict[str, Any] | str | None:
    """Return the problems of one architecture by placement, as an earlier run kept them, or why it was skipped.

    None without a folder, or if no run has tried it.
    """
    path = None if folder is None else Path(folder) / f"{name}-{dtype}.json"
    if path is None or not path.exists():
        return None
    kept = json.loads(path.read_text())
    if "skipped" in kept:
        return str(kept["skipped"])
    return {placement: each["problems"] for placement, each in kept.items() if each["problems"]}


def result_of(folder: Path) -> dict[str, Any]:
    """Return the result: a row for each placement and dtype, the exceptions by name, what has no tiny model, and the
    architectures by family if all are of those that the guide keeps."""
    kept = {path.stem.rpartition("-")[::2]: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    skipped = {name: each["skipped"] for (name, _), each in kept.items() if "skipped" in each}
    exceptions = [
        [name, dtype, placement, "; ".join(each["problems"])]
        for (name, dtype), found in kept.items()
        if "skipped" not in found
        for placement, each in found.items()
        if each["problems"]
    ]
    rows = [
        _row(placement, dtype, [each[placement] for (_, of), each in kept.items() if of == dtype and placement in each])
        for placement in PLACEMENTS
        for dtype in DTYPES
        if any(of == dtype and placement in each for (_, of), each in kept.items())
    ]
    families = [[family, ", ".join(names)] for family, names in KEPT.items()]
    only_kept = {name for name, _ in kept} <= {name for names in KEPT.values() for name in names}
    tables: list[tuple[str, dict[str, str], list[Any]]] = [
        ("Tiny models of transformers' architectures on each placement", UNITS, rows),
        ("Exceptions", dict.fromkeys(("architecture", "dtype", "placement", "what"), ""), exceptions),
        (
            "Without a tiny model",
            dict.fromkeys(("architecture", "reason"), ""),
            [list(each) for each in skipped.items()],
        ),
        ("Architectures", dict.fromkeys(("family", "architectures"), ""), families if only_kept else []),
    ]
    return {
        "command": "make zoo ONLY=kept" if only_kept else "make zoo",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tables": [{"title": title, "units": units, "rows": lines} for title, units, lines in tables],
        "limits": [],
    }


def _row(placement: str, dtype: str, found: list[dict[str, Any]]) -> list[Any]:
    ratios = [each["ratio"] for each in found if each["ratio"] is not None]
    ran = [each for each in found if not each["raised"]]
    return [
        placement,
        dtype,
        len(found),
        sum(not each["differing"] for each in ran),
        sum(each["kept"] for each in ran),
        sum(each["restored"] for each in ran),
        sum(not each["unknown"] for each in ran),
        min(ratios, default=None),
        statistics.median(ratios) if ratios else None,
    ]


def lines_of(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table as lines of text."""
    shown = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell or "-") for cell in row] for row in table["rows"]]
    cells = [list(table["units"]), *shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    yield table["title"]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def main(folder: str, kept: str) -> None:
    """Write the result of a folder, and print it."""
    result = result_of(Path(folder))
    Path(kept).write_text(json.dumps(result, indent=1) + "\n")
    for table in result["tables"]:
        print(*lines_of(table), "", sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
