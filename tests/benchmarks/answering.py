"""Ask a question in its quick size and look at the answer."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bigmodel.benchmarks.command import run


def answer(arguments: list[str], workdir: Path, capsys: pytest.CaptureFixture[str], rounds: int = 1) -> dict[str, Any]:
    """Return the JSON that a question prints, run with tiny sizes; the same must have been kept as a file."""
    results = Path(tempfile.mkdtemp(dir=workdir, prefix="results-"))
    common = ["--quick", "--json", "--rounds", str(rounds), "--workdir", str(workdir), "--results", str(results)]
    assert run([*arguments, *common]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    (kept,) = results.iterdir()
    assert kept.name.startswith(f"{arguments[0]}-")
    assert json.loads(kept.read_text())["tables"] == printed["tables"]
    return printed


def rows(found: dict[str, Any], table: int = 0) -> list[dict[str, Any]]:
    """Return the rows of one table."""
    listed: list[dict[str, Any]] = found["tables"][table]["rows"]
    return listed


def limit(found: dict[str, Any], words: str) -> dict[str, Any]:
    """Return the one limit whose description contains `words`."""
    (one,) = [entry for entry in found["limits"] if words in entry["what"]]
    kept: dict[str, Any] = one
    return kept
