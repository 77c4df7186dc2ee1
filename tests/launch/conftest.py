"""What several modules of these tests look at, made once."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import ROOT, Program

from .starting import ended


@dataclass(frozen=True)
class Forked:
    """What came of the calls in `forking.py`: messages of errors by call, and the files that processes wrote."""

    folder: Path
    outcomes: dict[str, str]
    left: list[str]  # in the temporary folder

    def written(self, name: str) -> list[Any]:
        """What the processes of one call wrote, in their order."""
        return [json.loads(path.read_text()) for path in sorted((self.folder / name).glob("*.json"))]


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Forked:
    """Run `forking.py` in a process of its own."""
    folder = tmp_path_factory.mktemp("forking")
    temporary = folder / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    done = ended(Program(["-m", "tests.launch.forking", folder], environment))
    assert done.returncode == 0, done.stderr
    return Forked(folder, json.loads((folder / "outcomes.json").read_text()), sorted(os.listdir(temporary)))
