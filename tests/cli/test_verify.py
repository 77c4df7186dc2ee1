"""bigmodel verify: its table. What it finds is tested with the run itself, in tests/dispatch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rich.console import Console

from bigmodel.cli.main import run
from bigmodel.cli.verify import findings_table, time_verdict
from bigmodel.verify import verify
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


@pytest.mark.parametrize(
    ("predicted", "spread", "verdict"),
    [
        (1.1, 0.0, "within the tolerance of 20%"),
        (1.4, 0.3, "not by more than the spread of the runs"),
        (0.4, 0.3, "past the tolerance of 20% and the spread of the runs"),
    ],
)
def test_a_time_is_judged_against_the_spread_of_its_runs(predicted: float, spread: float, verdict: str) -> None:
    line = time_verdict(Finding("", "step", "seconds", predicted, 1.0, spread), 0.2)
    assert line.endswith(verdict)
    assert f"runs varied by {spread:.0%}" in line


@pytest.mark.parametrize(("measured", "resolution", "code"), [(100, 0, 0), (90, 0, 1), (90, 9, 1), (90, 10, 0)])
def test_memory_alone_decides_the_exit_code_as_far_as_it_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: int, resolution: int, code: int
) -> None:
    memory = Finding("cpu", "peak memory", "bytes", 100, measured, resolution=resolution)
    findings = [memory, Finding("", "step", "seconds", 1.0, 9.0, 0.1)]
    monkeypatch.setattr(verify, "verify", lambda *arguments, **options: (SimpleNamespace(notes=[]), findings))
    assert run(["verify", "any/model"]) == code
    said = capsys.readouterr().err
    assert "time of step: error -89%, runs varied by 10%" in said
    assert ("memory is past the tolerance" in said) is bool(code)


def test_a_model_that_is_not_there_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "/nonexistent/model"]) == 1
    assert "/nonexistent/model" in capsys.readouterr().err
