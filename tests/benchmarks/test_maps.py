from __future__ import annotations

import argparse

import pytest

from bigmodel.benchmarks.harness.report import Cell
from bigmodel.benchmarks.maps import ACCELERATE, FITTED, SHARED, STREAMED, report


def rows(streamed: float, shared: float) -> list[list[Cell]]:
    ratios = {ACCELERATE: 0.9, FITTED: 1.0, STREAMED: streamed, SHARED: shared}
    return [["llama", 0.6, name, ratio, ratio, "yes"] for name, ratio in ratios.items()]


@pytest.mark.parametrize(("streamed", "shared", "kept"), [(0.9, 0.5, True), (1.04, 1.0, True), (0.9, 1.2, False)])
def test_no_plan_may_be_slower_than_accelerates_map(streamed: float, shared: float, kept: bool) -> None:
    options = argparse.Namespace(device="virtual", steps=1)
    assert report(options, rows(streamed, shared), {}).kept is kept
