"""bigmodel verify: its table. What it finds is tested with the run itself, in tests/dispatch."""

from __future__ import annotations

import pytest
from rich.console import Console

from bigmodel.cli.main import run
from bigmodel.cli.verify import findings_table
from bigmodel.verify.verify import Finding


def test_bytes_and_seconds_stand_beside_their_errors() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(
            findings_table(
                [
                    Finding("virtual:0", "peak memory", "bytes", 2**20, 2**20),
                    Finding("virtual:0", "step", "seconds", 0.010, 0.008),
                ]
            )
        )
    first, second = (line for line in captured.get().splitlines() if "virtual:0" in line)
    assert first.count("1.00 MiB") == 2
    assert "+0.00%" in first
    assert "10.00 ms" in second
    assert "+25.00%" in second


def test_a_model_that_is_not_there_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "/nonexistent/model"]) == 1
    assert "/nonexistent/model" in capsys.readouterr().err
