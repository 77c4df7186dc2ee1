"""A plot of prediction errors as SVG: one dot per figure."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, LANE = 900, 60, 150, 50, 22
KINDS = {"bytes": ("peak memory", "#4e79a7"), "seconds": ("time of a pass", "#e15759")}
MARKS = (-0.2, -0.1, 0.0, 0.1, 0.2)
MOST = 0.25
"""Larger errors are drawn at the edge."""


def svg(findings: Sequence[Mapping[str, Any]]) -> str:
    """Return a plot with a lane for each family, and a dot for each of its figures at the error of its prediction.

    Args:
        findings: each with "family", "unit" ("bytes" or "seconds"), "error" (a fraction) and "said" (a description).
    """
    families = list(dict.fromkeys(str(one["family"]) for one in findings))
    height = TOP + LANE * len(families) + HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="16" y="24" font-size="15">How far predictions are from what was measured</text>',
        *_scale(TOP + LANE * len(families)),
        *_dots(findings, families),
        *_legend(height - 14),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _x(error: float) -> float:
    share = (min(max(error, -MOST), MOST) + MOST) / (2 * MOST)
    return LEFT + share * (WIDTH - LEFT - 30)


def _scale(bottom: int) -> Iterator[str]:
    for mark in MARKS:
        x = _x(mark)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#dddddd"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{100 * mark:+.0f} %</text>'


def _dots(findings: Sequence[Mapping[str, Any]], families: Sequence[str]) -> Iterator[str]:
    for lane, family in enumerate(families):
        yield f'<text x="16" y="{TOP + LANE * lane + 15}">{html.escape(family)}</text>'
    for one in findings:
        above = 7 if one["unit"] == "bytes" else 15
        y = TOP + LANE * families.index(str(one["family"])) + above
        yield (
            f'<circle cx="{_x(one["error"]):.1f}" cy="{y}" r="3.5" fill="{KINDS[one["unit"]][1]}" fill-opacity="0.7">'
            f"<title>{html.escape(str(one['said']))}: {100 * one['error']:+.2f} %</title></circle>"
        )


def _legend(y: int) -> Iterator[str]:
    for number, (name, colour) in enumerate(KINDS.values()):
        x = LEFT + 160 * number
        yield f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/><text x="{x + 10}" y="{y}">{name}</text>'
