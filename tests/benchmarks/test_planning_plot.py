from __future__ import annotations

import xml.etree.ElementTree as Tree
from typing import Any

from bigmodel.benchmarks.planning_plot import svg


def finding(family: str, unit: str, error: float) -> dict[str, Any]:
    return {"family": family, "unit": unit, "error": error, "said": f"<{family}>"}


def dots(text: str) -> list[float]:
    found = Tree.fromstring(text).iter("{http://www.w3.org/2000/svg}circle")
    return [float(dot.get("cx", "")) for dot in found if dot.get("fill-opacity")]


def test_there_is_a_dot_for_each_figure_and_larger_errors_lie_further_right() -> None:
    drawn = dots(svg([finding("a", "bytes", error) for error in (-0.1, 0.0, 0.1)]))
    assert drawn == sorted(drawn)
    assert len(set(drawn)) == 3


def test_errors_beyond_the_picture_are_drawn_at_its_edge() -> None:
    assert len(set(dots(svg([finding("a", "seconds", error) for error in (0.5, 9.0)])))) == 1
