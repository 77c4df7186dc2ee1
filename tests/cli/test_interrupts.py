"""Ctrl-C at adversarial moments of a command: exit code 130, one line, no traceback, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from bigmodel.cli.commands import COMMANDS
from bigmodel.cli.interrupts import EndingAtOnce, end_at_once, raise_again
from tests.cli.test_serve_process import folder, serving
from tests.preloaded import ROOT

__all__ = ["folder"]  # a fixture


def interrupted(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, interrupted when it imports the module."""
    command = [sys.executable, "tests/cli/interrupted.py", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)


EARLY = ["bigmodel.cli.log_filters", "typer", "bigmodel.cli.commands", "bigmodel.cli.serve"]
LATE = ["torch", "torch._C"]
LAST = ["transformers", "bigmodel.server.http.run"]
"""Imported after others that take seconds."""


def test_nothing_is_imported_before_ctrl_c_is_prepared_for_but_what_says_so() -> None:
    code = "import os, sys; before = {*sys.modules}; import bigmodel.cli.main; print(*sorted({*sys.modules} - before))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    bare = [sys.executable, "-S", "-c", code]  # without what packages of the environment import at the start
    found = subprocess.run(bare, capture_output=True, text=True, env=environment, check=True).stdout.split()
    ours = ["bigmodel", "bigmodel.cli", "bigmodel.cli.interrupts", "bigmodel.cli.main", "bigmodel.lazy_names"]
    assert found == ["__future__", *ours]


@pytest.mark.parametrize(
    "module",
    [
        *EARLY,
        *(pytest.param(name, marks=pytest.mark.slow) for name in LATE),
        *(pytest.param(name, marks=[pytest.mark.long, pytest.mark.slow]) for name in LAST),
    ],
)
def test_serve_is_interrupted_while_it_imports(module: str) -> None:
    done = interrupted(module, "serve", "/no/model")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "bigmodel: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "generate", "plan"])
def test_any_command_is_interrupted_while_it_imports(command: str) -> None:
    done = interrupted(f"bigmodel.cli.{COMMANDS[command]}", command)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "bigmodel: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["plan", "/no/model"], pytest.param(["env"], marks=pytest.mark.long)])
def test_a_command_is_interrupted_while_it_imports_torch(arguments: list[str]) -> None:
    done = interrupted("torch", *arguments)
    assert (done.returncode, done.stderr) == (130, "bigmodel: interrupted\n")


@pytest.mark.slow
def test_serve_is_interrupted_at_its_first_output_while_it_loads(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log", wait=False) as served:
        served.process.send_signal(signal.SIGINT)
        assert served.code() == 130
        assert "Traceback" not in served.said()
        assert served.said().endswith("bigmodel: interrupted\n")


@pytest.mark.long
@pytest.mark.slow
def test_serve_is_interrupted_while_it_answers_and_compiles(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install bigmodel[json]")
    schema = {"name": "a", "schema": {"type": "string", "pattern": "^[a-z]{2}$"}}
    with serving(folder, tmp_path / "log", "--drain-timeout", "0") as served:
        served.complete(max_tokens=1, response_format={"type": "json_schema", "json_schema": schema})
        (worker,) = psutil.Process(served.process.pid).children()
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(served.complete(max_tokens=900)))
        asking.start()
        while not httpx.get(f"{served.url}/plan?parts=false").json()["engine"]["running"]:
            time.sleep(0.01)
        served.process.send_signal(signal.SIGINT)
        assert served.code() == 130
        asking.join()
        assert answers[0].status_code in (200, 500)
        assert "Traceback" not in served.said()
        psutil.wait_procs([worker])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a shell starts in the background inherits that Ctrl-C is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
def test_after_the_context_an_interrupt_raises_again() -> None:
    with EndingAtOnce():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_ignores_interrupts_goes_on_doing_so() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        end_at_once()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        raise_again()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_another_thread_s_interrupts_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=end_at_once)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
