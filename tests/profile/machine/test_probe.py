from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from filelock import FileLock

from bigmodel.devices import virtual
from bigmodel.profile.machine import machine as machine_json
from bigmodel.profile.machine import probe
from bigmodel.profile.machine.machine import MachineProfile
from bigmodel.profile.machine.probe import last_cache_bytes, processor_name
from bigmodel.profile.machine.timing import QUICK, Effort
from tests.preloaded import run

from .recorded import record_once


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts measurings, which are made up here: what is tested is who measures when."""
    count: list[int] = []
    from bigmodel.profile.machine.machine import nominal_machine

    def measure(_effort: object, _folder: Path, key: str = "") -> MachineProfile:
        count.append(1)
        return replace(nominal_machine(), key=key, measured_at=time.time())

    monkeypatch.setattr(probe, "measure", measure)
    return count


def test_a_machine_is_measured_once_and_again_on_request(tmp_path: Path, measured: list[int]) -> None:
    first = probe.machine(effort=QUICK, folder=tmp_path)
    assert probe.machine(effort=QUICK, folder=tmp_path) == first
    assert len(measured) == 1
    assert probe.machine(refresh=True, effort=QUICK, folder=tmp_path) != first
    assert len(measured) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_second_process_waits_for_the_first_and_reads_its_result(tmp_path: Path, measured: list[int]) -> None:
    found: list[MachineProfile] = []
    key = probe.machine_key(QUICK)
    lock = FileLock(tmp_path / f"{key}.lock", thread_local=False)
    with lock:
        waiting = threading.Thread(target=lambda: found.append(probe.machine(effort=QUICK, folder=tmp_path)))
        waiting.start()
        theirs = probe.measure(QUICK, tmp_path, key)
        (tmp_path / f"{key}.json").write_text(machine_json.dump(theirs))
    waiting.join(timeout=60)
    assert found == [theirs]
    assert len(measured) == 1


def test_a_damaged_profile_is_measured_again(tmp_path: Path, measured: list[int]) -> None:
    probe.machine(effort=QUICK, folder=tmp_path)
    (tmp_path / f"{probe.machine_key(QUICK)}.json").write_text("{")
    probe.machine(effort=QUICK, folder=tmp_path)
    assert len(measured) == 2


def test_a_profile_of_an_older_format_is_measured_again(tmp_path: Path, measured: list[int]) -> None:
    path = tmp_path / f"{probe.machine_key(QUICK)}.json"
    probe.machine(effort=QUICK, folder=tmp_path)
    path.write_text(path.read_text().replace(f'"format": {machine_json.FORMAT}', '"format": 2'))
    probe.machine(effort=QUICK, folder=tmp_path)
    assert len(measured) == 2
    assert machine_json.load(path.read_text()).expert_overhead.module > 0


def test_a_profile_that_cannot_be_used_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"{probe.machine_key(Effort())}.json"
    path.write_text(json.dumps({"format": 2}))
    assert probe.known_machine(tmp_path) is None
    assert probe.known_machine(tmp_path) is None
    (said,) = caplog.messages
    assert said.startswith(str(path))
    assert "bigmodel probe" in said


@pytest.mark.long
@pytest.mark.slow
def test_a_profile_that_was_measured_on_a_busy_machine_is_used_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, cores = psutil.Process().cpu_times, os.cpu_count() or 1

    def all_programs() -> SimpleNamespace:
        return SimpleNamespace(user=own().user + own().system + 0.5 * cores * time.monotonic())

    monkeypatch.setattr(psutil, "cpu_times", all_programs)
    monkeypatch.setattr(probe, "accelerators", list)
    found = probe.machine(effort=QUICK, folder=tmp_path)
    assert found.others == pytest.approx(0.5, abs=0.02)
    assert probe.machine(effort=QUICK, folder=tmp_path) == found
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    (quiet / f"{found.key}.json").write_text(machine_json.dump(replace(found, others=0.05)))
    probe.machine(effort=QUICK, folder=quiet)
    warned = [record for record in caplog.records if "other programs" in record.message]
    assert len(warned) == 1
    assert "50 %" in warned[0].message


def test_profiles_are_kept_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert probe.cache_folder() == tmp_path / "bigmodel" / "machines"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert probe.cache_folder() == Path.home() / ".cache" / "bigmodel" / "machines"


def test_the_key_depends_on_the_setup(accelerators: None) -> None:
    before = probe.machine_key(QUICK)
    virtual.configure(0, bandwidth=1e9)
    assert probe.machine_key(QUICK) != before


@pytest.mark.slow
def test_a_quick_measurement_has_every_figure(
    accelerators: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_once(monkeypatch)
    virtual.configure(0, capacity=1000)
    machine = probe.measure(QUICK, tmp_path)
    assert set(machine.devices) == {"cpu", "virtual:0", "virtual:1"}
    assert set(machine.links) == {"cpu", "virtual:0", "virtual:1"}
    for speed in machine.devices.values():
        assert {"move", "product:float32", "product:bfloat16", "attention:float32"} <= set(speed.curves)
        assert speed.call > 0
        assert all(value > 0 for curve in speed.curves.values() for value in curve.values)
    assert min(machine.memory_rate, machine.disk_cold, machine.disk_warm) > 0
    assert list(tmp_path.iterdir()) == []
    assert machine_json.load(machine_json.dump(machine)) == machine
    assert torch.get_device_module("virtual").memory_allocated(0) == 0
    assert torch.get_device_module("virtual").max_memory_allocated(0) == 0


@pytest.mark.slow
def test_the_command_shows_what_is_known(tmp_path: Path) -> None:
    """In a process of its own, with a profile of this machine already there."""
    script = (
        "import sys, dataclasses; from pathlib import Path\n"
        "from bigmodel.profile.machine import probe, machine as machine_json\n"
        "from bigmodel.profile.machine.timing import Effort\n"
        "from bigmodel.profile.machine.machine import nominal_machine\n"
        "folder = probe.cache_folder(); folder.mkdir(parents=True); key = probe.machine_key(Effort())\n"
        "known = dataclasses.replace(nominal_machine(), key=key)\n"
        "(folder / f'{key}.json').write_text(machine_json.dump(known))\n"
        "from bigmodel.cli.main import run; sys.exit(run(['probe']))\n"
    )
    done = run(["-c", script], {**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "nominal" in done.stdout
    assert "25.0 GB/s" in done.stdout


def test_the_processor_has_a_name_on_one_line() -> None:
    assert processor_name().strip() == processor_name() != ""
    assert "\n" not in processor_name()


def test_the_last_level_cache_is_larger_than_a_page() -> None:
    assert last_cache_bytes() > 4096
