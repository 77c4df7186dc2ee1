"""bigmodel probe: what is known of this machine, as tables and as data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bigmodel.cli.main import run
from bigmodel.profile.machine import machine as machine_json
from bigmodel.profile.machine import probe
from bigmodel.profile.machine.machine import MachineProfile, nominal_machine
from bigmodel.profile.machine.timing import Effort


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineProfile:
    """A machine that was measured before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = probe.machine_key(Effort())
    machine = dataclasses.replace(nominal_machine(), key=key)
    probe.cache_folder().mkdir(parents=True)
    (probe.cache_folder() / f"{key}.json").write_text(machine_json.dump(machine))
    return machine


def test_what_was_measured_before_is_shown_at_once(known: MachineProfile, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe"]) == 0
    printed = capsys.readouterr()
    assert known.name in printed.out
    assert "disk, cold" in printed.out
    assert f"{known.disk_cold / 1e9:.1f} GB/s" in printed.out
    assert printed.err == ""


def test_json_can_be_read_back(known: MachineProfile, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "--json"]) == 0
    assert machine_json.load(capsys.readouterr().out) == known
