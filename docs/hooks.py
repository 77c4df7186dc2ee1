"""Tables and plots of the guide that are made from `benchmarks/results` when the guide is built.

A page names each in a line of its own, and the build fails if the result is missing:

    <!-- table: decode 0 columns=variant;median -->     a table of the result, by its number, and some of its columns
    <!-- bars: decode 0 median -->                       a column of that table as horizontal bars
    <!-- limits: decode -->                              limits, measured values, and whether they were kept
    <!-- command: decode -->                             the command, the date, the machine and the versions

``offload@nvidia`` for ``offload`` names the result of another machine: the one whose file begins so.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
MARK = re.compile(r"<!-- (table|bars|limits|command): (.+?) -->")
BAR = {"width": 760, "label": 270, "row": 26, "value": 90}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every mark of a page by its table, plot or text. A blank line after it ends a table."""
    makers = {"table": table, "bars": bars, "limits": limits, "command": command}
    return MARK.sub(lambda found: makers[found[1]](*found[2].split(maxsplit=2)) + "\n", markdown)


def result(name: str) -> dict[str, Any]:
    """Return the committed result of a benchmark: of a machine without a GPU, or as ``name@machine``."""
    benchmark, _, machine = name.partition("@")
    kinds = (machine,) if machine else ("cpu", "virtual")
    (path,) = (path for kind in kinds for path in RESULTS.glob(f"{benchmark}-{kind}*.json"))
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def table(name: str, number: str = "0", columns: str = "") -> str:
    """Return a table of a result in Markdown."""
    found = result(name)["tables"][int(number)]
    units: dict[str, str] = found["units"]
    wanted = columns.removeprefix("columns=").split(";") if columns else list(units)
    places = [list(units).index(column) for column in wanted]
    lines = [" | ".join(wanted), " | ".join("---:" if units[column] else "---" for column in wanted)]
    for row in found["rows"]:
        lines.append(" | ".join(shown(cells(row)[place], list(units.values())[place]) for place in places))
    return f"**{found['title']}**\n\n" + "\n".join(f"| {line} |" for line in lines)


def bars(name: str, number: str = "0", column: str = "median") -> str:
    """Return a column of a result's table as an inline SVG, one bar for each row."""
    found = result(name)["tables"][int(number)]
    place = list(found["units"]).index(column)
    rows = [(str(cells(row)[0]), cells(row)[place]) for row in found["rows"]]
    values = [(label, float(value)) for label, value in rows if isinstance(value, (int, float))]
    longest = max(value for _, value in values) or 1.0
    room = BAR["width"] - BAR["label"] - BAR["value"]
    height = BAR["row"] * len(values) + 6
    parts = [f'<svg class="bars" viewBox="0 0 {BAR["width"]} {height}" role="img" aria-label="{column} of {name}">']
    for index, (label, value) in enumerate(values):
        y, width = 4 + index * BAR["row"], max(1.0, room * value / longest)
        kind = "ours" if label.startswith("bigmodel") else "other"
        text = html.escape(label)
        parts.append(f'<text x="{BAR["label"] - 8}" y="{y + 15}" text-anchor="end">{text}</text>')
        parts.append(f'<rect class="{kind}" x="{BAR["label"]}" y="{y}" width="{width:.1f}" height="20" rx="2"/>')
        shown_value = html.escape(shown(value, found["units"][column]))
        parts.append(f'<text x="{BAR["label"] + width + 6:.1f}" y="{y + 15}">{shown_value}</text>')
    return "".join([*parts, "</svg>"])


def limits(name: str) -> str:
    """Return the limits of a benchmark, in Markdown."""
    lines = ["| limit | measured | bound | |", "|---|---:|---:|---|"]
    for limit in result(name)["limits"]:
        measured, bound = shown(limit["measured"], limit["unit"]), shown(limit["bound"], limit["unit"])
        lines.append(f"| {limit['what']} | {measured} | {limit['relation']} {bound} | {kept(limit)} |")
    return "\n".join(lines)


def kept(limit: dict[str, Any]) -> str:
    """Return whether a limit was kept, in a word."""
    return "kept" if limit["kept"] else "**missed**"


def command(name: str) -> str:
    """Return the command that repeats a benchmark, with the date, the machine and the versions of its result."""
    found = result(name)
    machine = found["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["packages"].items())
    where = ", ".join([f"{machine['cores']} cores of {machine['cpu']}", *machine["accelerators"]])
    again = found["command"] if "@" in name else f"python -m benchmarks {name.replace('_', '-')}"
    return f"`{again}` ({found['date'][:10]}, {where}, {_threads(machine['threads'])}; {versions})."


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def cells(row: Any) -> list[Any]:
    """Return the cells of a row, kept as a list or by column."""
    return list(row.values()) if isinstance(row, dict) else list(row)


def shown(value: Any, unit: str) -> str:
    """Return a value as text in the manner of its unit."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if unit == "seconds":
        return seconds(float(value))
    if unit == "rate":
        return f"{value / 1e9:.2f} GB/s"
    if unit == "ratio":
        return f"{value:.2f}"
    if unit == "percent":
        return f"{100 * value:.2f} %"
    return f"{value:,.0f}" if unit in ("bytes", "count") or float(value).is_integer() else f"{value:.4g}"


def seconds(value: float) -> str:
    """Return seconds with a fitting unit and three digits."""
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} µs"
