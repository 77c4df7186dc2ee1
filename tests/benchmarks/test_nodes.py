from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bigmodel.benchmarks.nodes import ALONE, LINKS, ROOMY, run


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deployments_have_the_bits_of_one_node_and_take_as_long_as_their_links(tmp_path: Path) -> None:
    given = {"workdir": tmp_path, "quick": True, "device": "virtual", "size": None, "steps": 2, "link": 4.0}
    report = run(argparse.Namespace(**given, rounds=1, seed=0))
    rows = report.tables[0].rows
    assert [row[0] for row in rows] == [ROOMY, ALONE, [*LINKS][-1]]
    assert [row[-1] for row in rows] == ["yes"] * len(rows)
    assert float(str(rows[0][2])) == 0 < float(str(rows[1][2]))
    for row in rows[2:]:
        assert float(str(row[5])) >= float(str(row[3]))
