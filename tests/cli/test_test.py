"""`bigmodel test`."""

from __future__ import annotations

import pytest

from bigmodel.cli.main import run
from tests.launch.starting import ended, start_command


def test_no_process_checks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["test", "--num_processes", "0"]) == 2
    assert "num_processes" in capsys.readouterr().err


@pytest.mark.slow
def test_a_right_configuration_passes() -> None:
    done = ended(start_command("test", "--cpu", "--num_processes", 2, fork_ranks=True))
    assert done.returncode == 0, done.stderr
    assert "Processes: 2 " in done.stdout
    assert done.stdout.splitlines()[-1] == "The configuration works."
