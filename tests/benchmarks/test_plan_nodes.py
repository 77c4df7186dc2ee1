from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bigmodel.benchmarks.plan_nodes import run


@pytest.mark.long
@pytest.mark.slow
def test_the_cut_for_throughput_has_the_faster_slowest_stage(tmp_path: Path) -> None:
    report = run(argparse.Namespace(workdir=tmp_path, quick=True, device="cpu"))
    latency, throughput = report.tables[0].rows
    assert [sum(map(int, str(row[1]).split(", "))) for row in (latency, throughput)] == [4, 4]
    assert float(str(latency[4])) <= float(str(throughput[4]))
    assert float(str(throughput[5])) <= float(str(latency[5]))
