"""Results as data: one file for each question and device, replaced whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigmodel.benchmarks.harness import Report, device_slug, save_report, store
from bigmodel.benchmarks.harness.store import command_line, results_folder

REPORT = Report("decode", "cpu", {"steps": 4})


def test_a_result_says_what_was_run_on_what_and_when(tmp_path: Path) -> None:
    path = save_report(REPORT, ["decode", "--steps", "4"], tmp_path)
    data = json.loads(path.read_text())
    assert path.name == f"decode-{device_slug('cpu')}.json"
    assert data["command"] == "python -m benchmarks decode --steps 4"
    assert {"cpu", "cores", "memory", "accelerators", "packages", "threads"} <= set(data["machine"])
    assert data["machine"]["packages"]["torch"]
    assert data["date"].endswith("+00:00")
    assert data["settings"] == {"steps": 4}


def test_a_result_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_report(REPORT, ["decode"], tmp_path)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_report(Report("decode", "cpu", {"steps": 5}), ["decode"], tmp_path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_paths_of_this_machine_are_not_kept(tmp_path: Path) -> None:
    assert command_line(["memory", str(tmp_path)]) == f"python -m benchmarks memory {tmp_path.name}"
    assert command_line(["memory", "org/model"]) == "python -m benchmarks memory org/model"


def test_results_go_to_the_working_folder_where_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results_folder().parts[-2:] == ("benchmarks", "results")
    monkeypatch.setattr(store, "_COMMITTED", tmp_path / "missing")
    monkeypatch.chdir(tmp_path)
    assert save_report(REPORT, ["decode"]).resolve().parent == tmp_path / "benchmark-results"


def test_devices_have_names_fit_for_files() -> None:
    for device in ("cpu", "virtual"):
        slug = device_slug(device)
        assert slug.startswith(f"{device}-")
        assert slug == slug.lower()
        assert slug.replace("-", "").isalnum()
