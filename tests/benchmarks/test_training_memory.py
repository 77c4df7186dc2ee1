from __future__ import annotations

import argparse
from typing import Any

import pytest

from bigmodel.benchmarks.training_memory import report


def rows(whole: float, sharded: float) -> list[list[Any]]:
    return [[2, "ddp", "no", 0, 100, 100, whole], [2, "fsdp", "no", 0, 100, 100, sharded]]


@pytest.mark.parametrize(
    ("whole", "sharded", "kept"), [(0.0, 0.0, True), (-0.01, 0.0, False), (0.0, 0.015, True), (0.0, -0.03, False)]
)
def test_each_way_of_training_has_its_limit(whole: float, sharded: float, kept: bool) -> None:
    assert report(argparse.Namespace(device="cpu"), rows(whole, sharded)).kept is kept
