"""The list of what an accelerator shows: every benchmark in a process of its own, kept as it comes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from bigmodel.benchmarks import gpu
from bigmodel.benchmarks.command import main, questions
from bigmodel.benchmarks.harness import Report

from .answering import rows


def kept(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("gpu-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


class Processes:
    """Stands in for processes: each benchmark keeps a result at once, fails, or runs for longer than it may."""

    PIPE, DEVNULL, TimeoutExpired = subprocess.PIPE, subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, folder: Path, failing: str = "", hanging: str = "") -> None:
        self.folder, self.failing, self.hanging = folder, failing, hanging
        self.commands: list[list[str]] = []
        self.limits: list[float] = []
        self.kept_before: list[int] = []

    def folder_of(self) -> Path:
        """Where the running benchmark keeps its result."""
        return self.folder

    def Popen(self, command: list[str], **options: Any) -> Processes:
        assert options["start_new_session"]
        self.commands.append(command)
        self.kept_before.append(len(list(self.folder.glob("gpu-*.json"))))
        self.name = command[3]
        self.pid = 2**22 + 1  # above the largest number of a process
        self.returncode = int(self.name == self.failing)
        return self

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.limits.append(timeout)
        if self.name == self.hanging:
            raise subprocess.TimeoutExpired(self.name, timeout)
        if not self.returncode:
            report = Report(self.name.replace("-", "_"), "virtual", notes=["measured"])
            report.limits.append(gpu.Limit("ratio", 2.0, "<=", 1.0))
            gpu.save_report(report, [self.name], self.folder_of())
        return "", "a traceback\nout of memory\n"

    def wait(self) -> int:
        return self.returncode


@pytest.mark.slow
def test_a_list_that_is_told_to_end_ends_what_runs_and_keeps_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[int, int]] = []

    class Interrupted(Processes):
        def communicate(self, timeout: float) -> tuple[str, str]:
            if self.name == "overlap":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            return super().communicate(timeout)

    processes = Interrupted(tmp_path)
    monkeypatch.setattr(gpu, "subprocess", processes)
    monkeypatch.setattr(os, "killpg", lambda *given: ended.append(given))
    # Without the list's own way to end, the test's process would be killed.
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the list does not know of the signal"))
    try:
        with pytest.raises(SystemExit) as exit_:
            main(["gpu", "--device", "virtual", "--quick", "--results", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert exit_.value.code == 128 + signal.SIGTERM
    assert ended == [(processes.pid, signal.SIGKILL)] * 2
    assert [(row["benchmark"], row["ended"]) for row in rows(kept(tmp_path))] == [("threads", "done")]


def listed(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, **behaviour: str) -> Processes:
    """Run the list in its tiny form with processes that are stand-ins."""
    processes = Processes(folder, **behaviour)
    monkeypatch.setattr(gpu, "subprocess", processes)
    assert main(["gpu", "--device", "virtual", "--quick", "--results", str(folder), *arguments]) == 0
    return processes


@pytest.mark.slow
def test_most_telling_comes_first_and_each_result_is_kept_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = listed(tmp_path, monkeypatch)
    names = [command[3] for command in processes.commands]
    assert names[:4] == ["threads", "overlap", "overhead", "offload"]
    assert processes.kept_before == [0] + [1] * (len(names) - 1)
    assert [row["benchmark"] for row in rows(kept(tmp_path))] == names


def test_a_process_may_take_half_of_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = listed(tmp_path, monkeypatch, "--only", "threads,overlap,overhead", "--minutes", "2")
    assert processes.limits == pytest.approx([60, 60, 120], abs=5)


def test_the_list_goes_on_when_one_fails_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--only", "threads,overlap,overhead", "--minutes", "2")
    listed(tmp_path, monkeypatch, *arguments, failing="threads", hanging="overlap")
    ended = [row["ended"] for row in rows(kept(tmp_path))]
    assert ended[0] == "failed (exit 1): out of memory"
    assert ended[1].startswith("stopped after 6")
    assert ended[2] == "done"
    assert [(limit["what"], limit["kept"]) for limit in kept(tmp_path)["limits"]] == [("overhead: ratio", False)]


@pytest.mark.slow
def test_what_too_little_time_is_left_for_runs_with_tiny_sizes_and_replaces_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(tmp_path / "of processes")
    monkeypatch.setattr(gpu, "subprocess", processes)
    monkeypatch.setattr(Processes, "folder_of", lambda self: Path(self.commands[-1][-1]))
    arguments = ["gpu", "--device", "virtual", "--results", str(tmp_path), "--only", "threads,overlap,load"]
    assert main([*arguments, "--minutes", "3"]) == 0
    assert ["--quick" in command for command in processes.commands] == [False, False, False]
    assert main([*arguments, "--minutes", "1.5"]) == 0
    assert ["--quick" in command for command in processes.commands[3:]] == [True, True, False]
    assert [("tiny" in row["ended"], row["benchmark"]) for row in rows(kept(tmp_path))] == [
        (True, "threads"),
        (True, "overlap"),
        (False, "load"),
    ]
    assert {limit["what"] for limit in kept(tmp_path)["limits"]} == {
        "threads with tiny sizes: ratio",
        "overlap with tiny sizes: ratio",
        "load: ratio",
    }
    assert {path.name.partition("-")[0] for path in tmp_path.glob("*.json")} == {"gpu", "threads", "overlap", "load"}


@pytest.mark.slow
def test_nothing_is_begun_when_the_minutes_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = listed(tmp_path, monkeypatch, "--minutes", "0")
    assert not processes.commands
    assert {row["ended"] for row in rows(kept(tmp_path))} == {"not begun: the minutes were over"}


@pytest.mark.parametrize("part", gpu.PARTS, ids=lambda part: part.name)
def test_its_arguments_are_known_to_the_benchmark(part: gpu.Part) -> None:
    module: Any = importlib.import_module(f"bigmodel.benchmarks.{part.name.replace('-', '_')}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    parser.parse_args([*part.arguments, *part.full])
    assert "cuda" in module.DEVICES
    assert part.name in gpu.ON_CUDA_ONLY or "virtual" in module.DEVICES


def test_every_benchmark_that_runs_on_cuda_is_in_the_list() -> None:
    listed = {part.name for part in gpu.PARTS}
    modules = {name: importlib.import_module(f"bigmodel.benchmarks.{name.replace('-', '_')}") for name in questions()}
    assert {name for name, module in modules.items() if "cuda" in module.DEVICES} == listed | {"gpu"}


@pytest.mark.parametrize(("described", "device"), [(None, "cuda"), ("1x512MiB@8GB", "virtual")])
def test_virtual_accelerators_of_the_environment_are_taken(
    described: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BIGMODEL_VIRTUAL", raising=False)
    if described is not None:
        monkeypatch.setenv("BIGMODEL_VIRTUAL", described)
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    assert parser.get_default("device") == device


def test_a_name_that_is_not_in_the_list_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--device", "virtual", "--quick", "--only", "threads,decode"]) == 2
    assert "--only decode" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_real_processes_keep_their_results(workdir: Path, tmp_path: Path) -> None:
    arguments = ["--device", "virtual", "--quick", "--rounds", "1", "--workdir", str(workdir)]
    assert main(["gpu", "--only", "threads", "--results", str(tmp_path), *arguments]) == 0
    assert [(row["ended"], row["missed"]) for row in rows(kept(tmp_path))] == [("done", 0)]
    assert len(list(tmp_path.glob("threads-*.json"))) == 1
