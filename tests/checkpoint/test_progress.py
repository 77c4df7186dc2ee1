from __future__ import annotations

import io
import sys

import pytest

from bigmodel.checkpoint.progress import byte_progress, watching


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_stays_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_progress("Loading", 100) as advance:
        advance(50)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_is_shown_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with byte_progress("Loading", 2**20) as advance:
        advance(2**20)
    assert "Loading" in terminal.getvalue()
    assert "1.0/1.0 MiB" in terminal.getvalue()


def test_observers_are_told_in_bytes_and_only_during_the_load() -> None:
    seen: list[tuple[int, int]] = []
    with watching(lambda done, total: seen.append((done, total))), byte_progress("Loading", 10) as advance:
        advance(4)
        advance(6)
    with byte_progress("Loading", 10) as advance:
        advance(10)
    assert seen == [(0, 10), (4, 10), (10, 10)]
