"""From when on does Ctrl-C end `bigmodel` without a traceback, beside the smallest program in Python that handles it?

Each program is started many times and interrupted after some milliseconds, in random order. Until the interpreter runs
a program's first line, which takes tens of milliseconds, it shows a traceback of its own, whatever the program is.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .harness import Column, Limit, Report, Table
from .harness.isolate import import_folder

SMALLEST, OURS = "the smallest program", "bigmodel"

PROGRAMS = {
    SMALLEST: """
import _signal, os
_signal.signal(_signal.SIGINT, lambda number, frame: os._exit(130))
import time
time.sleep(1)
""",
    # As installers write it.
    OURS: """
import sys
from bigmodel.cli.main import main
if __name__ == '__main__':
    sys.exit(main())
""",
}

ARGUMENTS = ("plan", "--help")
OUR_LINES = str(import_folder() / "bigmodel") + os.sep

MILLISECONDS = (*range(4, 60, 4), 80, 100, 150, 200)
LATE = 100
"""Milliseconds from which none shows a traceback."""

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "a command starts the same way for any device"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--tries", type=int, default=4, help="of each program and time, in each round")


@dataclass
class Found:
    """What became of a program, by the milliseconds after which it was interrupted."""

    tries: Counter[int] = field(default_factory=Counter)
    tracebacks: Counter[int] = field(default_factory=Counter)
    ours: int = 0

    def half(self) -> float:
        """Milliseconds from which on fewer than half of the tries show a traceback."""
        rare = (ms for ms in MILLISECONDS if all(2 * self.tracebacks[at] < self.tries[at] for at in _from(ms)))
        return min(rare, default=math.inf)


def run(options: argparse.Namespace) -> Report:
    """Interrupt each program after each time, and count tracebacks."""
    found = {name: Found() for name in PROGRAMS}
    paths = {name: options.workdir / f"program{number}.py" for number, name in enumerate(PROGRAMS)}
    for name, path in paths.items():
        path.write_text(PROGRAMS[name])
    rng = random.Random(options.seed)
    for _ in range(options.rounds):
        tries = [(name, ms) for name in PROGRAMS for ms in MILLISECONDS for _ in range(options.tries)]
        rng.shuffle(tries)
        for name, ms in tries:
            error = interrupted(paths[name], ms / 1e3)
            shown = "Traceback" in error or "KeyboardInterrupt" in error
            found[name].tries[ms] += 1
            found[name].tracebacks[ms] += shown
            found[name].ours += shown and OUR_LINES in error
    columns = [Column("interrupted after", "milliseconds"), *(Column(name, "ratio") for name in PROGRAMS)]
    rows = [[ms, *(each.tracebacks[ms] / each.tries[ms] for each in found.values())] for ms in MILLISECONDS]
    late = sum(found[OURS].tracebacks[ms] for ms in _from(LATE))
    share = found[OURS].ours / sum(found[OURS].tries.values())
    return Report(
        "interrupts",
        options.device,
        settings={"rounds": options.rounds, "tries": options.tries},
        tables=[Table("Tries that show a traceback", columns, rows)],
        limits=[]
        if options.quick
        else [
            Limit(f"tracebacks from {LATE} ms on", late, "==", 0, "count"),
            Limit("tries whose traceback shows a line of bigmodel", share, "<=", 0.01),
            Limit("time from which most show none, over the smallest program's", _ratio(found), "<=", 1.5),
        ],
        notes=[],
    )


def interrupted(program: Path, seconds: float) -> str:
    """Standard error of a program that is interrupted after so many seconds."""
    environment = {**os.environ, "PYTHONPATH": str(import_folder())}
    command = [sys.executable, str(program), *ARGUMENTS]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": environment}
    with subprocess.Popen(command, **pipes, preexec_fn=_heed_interrupts) as process:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass  # sleeping is not exact enough
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    return error.decode(errors="replace")


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores them


def _from(ms: int) -> list[int]:
    return [each for each in MILLISECONDS if each >= ms]


def _ratio(found: dict[str, Found]) -> float:
    return found[OURS].half() / found[SMALLEST].half()
