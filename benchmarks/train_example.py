"""How much faster is the language-modelling example on two processes than on one?

`examples/run_clm.py`, started by its command, fine-tunes a small GPT-2 on the standard library's docstrings for one
epoch, with one thread per process. The batch size per process is the same. Compared are the samples per second that the
example prints for its training epoch, without startup and evaluation.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from .harness import BenchmarkError, Column, Limit, Report, Table, Variant, measure

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "run_clm.py"
SPEEDUP = 1.8
COUNTS = {"1 process": 1, "2 processes": 2}

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it compares one process of the host with two"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--bytes", type=int, default=160_000, help="bytes of text that the example reads")
    parser.set_defaults(rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Run the example on one process and on two, in turn."""
    if not EXAMPLE.is_file():
        raise BenchmarkError(f"{EXAMPLE} is missing: run this benchmark in a checkout of the repository")
    length = 8_000 if options.quick else options.bytes
    variants = [Variant(name, Example(count, length)) for name, count in COUNTS.items()]
    samples = measure(variants, options.rounds, seed=options.seed)
    each = {name: 1 / samples.median(name) for name in COUNTS}
    ratio = each["2 processes"] / each["1 process"]
    columns = [Column("run"), Column("samples/s"), Column("over 1 process", "ratio")]
    rows: list[list[str | float]] = [[name, f"{each[name]:.1f}", each[name] / each["1 process"]] for name in COUNTS]
    return Report(
        "train_example",
        "cpu",
        {"bytes": length},
        [Table("examples/run_clm.py", columns, rows)],
        [Limit("samples/s of 2 processes over 1", ratio, ">=", SPEEDUP)],
        samples={"seconds a sample": samples},
    )


class Example:
    """The example on some processes; a call returns the seconds a sample took."""

    def __init__(self, processes: int, length: int) -> None:
        self._processes = processes
        launch = ["launch", "--cpu", "--num_processes", str(processes), "--num_cpu_threads_per_process", "1"]
        launch += ["--main_process_port", "0"] if processes > 1 else []
        script = [str(EXAMPLE), "--bytes", str(length)]
        self._command = [sys.executable, "-m", "bigmodel", *launch, *script]

    def __call__(self) -> float:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(self._command, env=environment, capture_output=True, text=True, check=False)
        rate = re.search(rf"processes {self._processes}: ([0-9.]+) samples/s", done.stdout)
        if done.returncode or rate is None:
            raise BenchmarkError(f"the example on {self._processes} processes failed:\n{done.stderr[-2000:]}")
        return 1 / float(rate[1])
