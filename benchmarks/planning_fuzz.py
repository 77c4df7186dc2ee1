"""Do budgets hold for random models, budgets and options, run on virtual accelerators?

Each case is planned by the search and its plan saved as JSON; another process, one for all cases, reads the plan,
dispatches the model by it and generates the planned shape. A device whose peak exceeds its budget or the prediction is
a violation. Peaks below the prediction are counted separately: mixtures are planned for their worst-case routing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from .fuzz_cases import ABOVE, BELOW, ENDS, EXACT, FAILED, OUTCOMES, RAN, STREAMED, VIOLATED, Outcome, fuzz, planned
from .harness import Column, Limit, Report, Table
from .harness.isolate import import_folder

DEVICES = ("virtual",)
"""Devices that this benchmark supports."""
ONLY = "its cases set the capacity of accelerators, which only virtual ones have"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--cases", type=int, default=None, help="how many are run (default: 500)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--outcomes",
        type=Path,
        default=None,
        help="file that each outcome is added to; cases in it are not run again, and all in it are reported",
    )
    parser.add_argument(
        "--reserved",
        action="store_true",
        help="larger models on accelerators whose allocators cache as CUDA's does: budgets are of reserved bytes",
    )
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Plan random cases in this process and run them in another; count violations."""
    count = options.cases or (5 if options.quick else 500)
    found = _kept(options.outcomes)
    missing = [number for number in range(options.first, options.first + count) if number not in found]
    _prepare()
    with Worker() as worker:
        for number in missing:
            plan = planned(number, options.seed, options.reserved)
            found[number] = worker.run(number, options.seed, plan, options.reserved)
            if options.outcomes is not None:
                with options.outcomes.open("a") as file:
                    file.write(json.dumps([number, asdict(found[number])]) + "\n")
    outcomes = {**_kept(options.outcomes), **found}
    return report(options.device, options.reserved, [outcomes[number] for number in sorted(outcomes)])


def _kept(path: Path | None) -> dict[int, Outcome]:
    """Return the outcomes in a file by the number of their case."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {number: Outcome(**outcome) for number, outcome in lines}


class Worker:
    """A process that runs planned cases, one after another. A case in which it exits has failed; the next one starts a
    new process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._answers: IO[str] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, number: int, seed: int, plan: str | None, reserved: bool = False) -> Outcome:
        """Run case `number` by its plan as JSON (None: the case was refused); `reserved`: as for `planned`."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._answers is not None
        try:
            case = {"number": number, "seed": seed, "plan": plan, "reserved": reserved}
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
            answer = self._answers.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return Outcome(**json.loads(answer))
        code = self._end()
        return Outcome(FAILED, {}, f"case {number}: the process that ran it ended with {code}")

    def _start(self) -> None:
        reads, writes = os.pipe()
        path = os.pathsep.join([str(import_folder()), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", __name__, str(writes)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            pass_fds=[writes],
            env={**os.environ, "PYTHONPATH": path},
        )
        os.close(writes)
        self._answers = os.fdopen(reads)

    def _end(self) -> int:
        if self._process is None or self._answers is None or self._process.stdin is None:
            return 0
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        code = self._process.wait()
        self._answers.close()
        self._process = self._answers = None
        return code


def _serve(answers: IO[str]) -> None:
    """Answer each case on standard input with its outcome, until the input ends."""
    _prepare()
    for line in sys.stdin:
        answers.write(json.dumps(asdict(fuzz(**json.loads(line)))) + "\n")
        answers.flush()


def report(device: str, reserved: bool, found: Sequence[Outcome]) -> Report:
    """Return the number of cases by outcome, in total and for each value of each dimension, and the limits."""
    kinds = Counter(outcome.kind for outcome in found)
    notes = [outcome.said for outcome in found if outcome.said and outcome.kind not in (BELOW, ENDS)]
    return Report(
        "planning_fuzz_reserved" if reserved else "planning_fuzz",
        device,
        settings={"cases": len(found)},
        tables=[
            Table(
                "Random models, budgets, shapes and choices",
                [Column("outcome"), Column("cases", "count")],
                [[name, kinds.get(name, 0)] for name in OUTCOMES],
            ),
            Table(
                "The same by dimension, of those that ran on an accelerator",
                [
                    Column("dimension"),
                    Column("value"),
                    Column("cases", "count"),
                    Column("streamed", "count"),
                    Column("to the byte", "count"),
                    Column("below the prediction", "count"),
                    Column("over the prediction", "count"),
                    Column("over a budget", "count"),
                ],
                [list(row) for row in _by_dimension(found)],
            ),
        ],
        limits=[
            Limit("budget violations", float(kinds[VIOLATED]), "==", 0, "count"),
            Limit("peaks over the prediction", float(kinds[VIOLATED] + kinds[ABOVE]), "==", 0, "count"),
            Limit("runs that failed", float(kinds[FAILED]), "==", 0, "count"),
        ],
        notes=[f"not as predicted: {said}" for said in notes[:5]],
    )


def _by_dimension(found: Sequence[Outcome]) -> Iterator[tuple[str, str, int, int, int, int, int, int]]:
    counted: dict[tuple[str, str], Counter[str]] = {}
    for outcome in found:
        for drawn in outcome.drawn.items():
            counted.setdefault(drawn, Counter())[outcome.kind] += 1
    for (dimension, value), kinds in sorted(counted.items()):
        ran = sum(kinds[kind] for kind in RAN)
        streamed, exact = kinds[STREAMED] + kinds[BELOW], kinds[EXACT] + kinds[STREAMED]
        over = kinds[ABOVE], kinds[VIOLATED]
        yield dimension, value, ran, streamed, exact, kinds[BELOW], *over


def _prepare() -> None:
    import torch
    from transformers.utils import logging

    from bigmodel.devices import virtual

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    virtual.enable(2)


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        _serve(answers)
