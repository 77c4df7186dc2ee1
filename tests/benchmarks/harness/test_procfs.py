"""What cannot be measured on a host with a poor /proc is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.harness import procfs


def test_nothing_is_missing_on_a_whole_linux() -> None:
    assert procfs.missing_counters() == []


def test_each_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "_PROCESS", tmp_path)
    assert [("clear_refs" in text, "pagemap" in text) for text in procfs.missing_counters()] == [
        (True, False),
        (False, True),
    ]
    (tmp_path / "clear_refs").touch()
    (tmp_path / "pagemap").touch()
    (tmp_path / "status").write_text("VmRSS: 1 kB\n")
    assert procfs.missing_counters() == ["the peak of host memory (no VmHWM in /proc/self/status)"]
