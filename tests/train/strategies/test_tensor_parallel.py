"""Layers split over ranks, alone and beside FSDP2, give what one process gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ...launch.starting import launched
from . import split

SCRIPT = Path(__file__).parent / "split.py"


def losses(folder: Path, processes: int, tp_size: int) -> list[list[float]]:
    folder.mkdir()
    kind = ["--distributed_type", "MULTI_CPU"]
    done = launched("--cpu", "--num_processes", processes, *kind, SCRIPT, folder, tp_size)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "split.json").read_text())
    assert found["again"] == found["losses"][6][0]
    return found["losses"]


@pytest.mark.slow
def test_losses_and_gradient_norms_are_those_of_one_process(tmp_path: Path) -> None:
    split.main(tmp_path, 1)
    alone = json.loads((tmp_path / "split.json").read_text())["losses"]
    for processes, tp_size in ((2, 2), (4, 2)):
        found = losses(tmp_path / f"{processes}x{tp_size}", processes, tp_size)
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in alone], rel=1e-6)
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in alone], rel=1e-5)
