from __future__ import annotations

import io
import sys

import pytest

from bigmodel.checkpoint.progress import byte_progress


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
