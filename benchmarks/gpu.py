"""What does an accelerator show in a few minutes? Runs the benchmarks that are about one, most telling first.

Each runs in a process of its own, which may take half of the minutes that are left; the last one may take all of them.
One that fails or takes longer does not stop the others. Those for which too little is left run with tiny sizes, which
shows that they run and are right. Results are kept as they come: each benchmark's own, and this list of their limits.
With ``--device virtual``, or ``BIGMODEL_VIRTUAL`` in the environment, the same runs on a virtual accelerator, without
accelerate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .harness import BenchmarkError, Column, Limit, Report, Table, UsageError, save_report
from .harness.isolate import environment_of_children
from .harness.procfs import missing_counters
from .harness.report import Cell
from .harness.store import results_folder

DEVICES = ("cuda", "virtual")
"""Devices that this benchmark supports."""
ONLY = "it lists what accelerators show"
"""Why it supports no others."""

LEAST = 20.0
"""Seconds that a benchmark is given even if fewer are left: its imports take about ten."""


FULL = 60.0
"""With fewer seconds than these a benchmark is run with tiny sizes: in full it would be stopped without a result."""


@dataclass(frozen=True)
class Part:
    """A benchmark of the list.

    Attributes:
        name: The benchmark, with dashes.
        shows: What it gives evidence of.
        arguments: Its own arguments.
        full: Further arguments where it does not run with ``--quick``.
    """

    name: str
    shows: str
    arguments: Sequence[str] = ()
    full: Sequence[str] = ()


PARTS = (
    Part("threads", "same bits with eight threads", ("--no-peers",), ("--seconds", "8")),
    Part("overlap", "copies hide behind compute"),
    Part("overhead", "microseconds of a streamed block"),
    Part("offload", "bytes per second beside pinned copies; accelerate in the same rounds"),
    Part("memory", "peak against plan and budget", (), ("--max-memory", "0=3GiB,cpu=16GiB")),
    Part("kv-tier", "keys and values in RAM are fetched ahead of use"),
    Part("experts", "a mixture: only chosen experts are fetched"),
    Part("serve-throughput", "tokens per second of arriving requests"),
    Part("serve-hybrid", "requests to models with recurrent states", ("--models", "qwen3-next")),
    Part("train-overhead", "a training step beside plain PyTorch's"),
    Part("load", "loading to the accelerator"),
    Part("pipeline", "from disk to the accelerator"),
    Part("stand-in", "transformers' own loader with bigmodel in accelerate's place", ("--files", "cached")),
    Part("serve-streamed", "requests on streamed weights"),
    Part("prompt-lookup", "fewer steps over streamed weights"),
    Part("speculation", "fewer steps by an MTP head or a draft model"),
    Part("prefix-folder", "prompts that are read and not computed"),
    Part("quantized", "weights cross the link as int8 and int4"),
    Part("resident", "nothing is left on a resident model"),
    Part("serve-latency", "seconds to the first token and between tokens"),
)
ON_CUDA_ONLY = frozenset({"train-overhead", "resident", "stand-in"})


@dataclass
class Outcome:
    """The end of one benchmark of the list.

    Attributes:
        ended: ``"done"``, or in words why there is no result.
        seconds: How long it took.
        limits: Its limits, as they are stored.
        notes: Its notes.
        tiny: Whether it was run with tiny sizes because too few seconds were left.
    """

    ended: str
    seconds: float
    limits: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tiny: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes for all of it")
    parser.add_argument("--only", default=None, help="names of benchmarks to run, as in threads,overlap")
    # Whoever describes virtual accelerators in the environment wants the list on these.
    parser.set_defaults(device="virtual" if "BIGMODEL_VIRTUAL" in os.environ else "cuda", rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Run every benchmark of the list in a process of its own, and keep the report after each.

    A signal that asks this process to end also ends the benchmark that runs: its processes are of another session.
    """
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        return _run(options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> Report:
    parts = chosen_parts(options)
    if options.device.startswith("cuda"):
        _check_cuda()
    folder = options.results or (Path(tempfile.mkdtemp()) if options.quick else results_folder())
    end = time.monotonic() + 60 * options.minutes
    report = Report("gpu", options.device, {"minutes": options.minutes, "rounds": options.rounds})
    outcomes: dict[Part, Outcome] = {}
    for number, part in enumerate(parts):
        left = end - time.monotonic()
        if left <= 0:
            outcomes[part] = Outcome("not begun: the minutes were over", 0.0)
        else:
            share = left if number == len(parts) - 1 else left / 2
            share = max(share, LEAST)
            tiny = share < FULL and not options.quick
            sizes = ", with tiny sizes" if tiny else ""
            print(f"{part.name}: {part.shows}, at most {share:.0f} s{sizes}", file=sys.stderr, flush=True)
            outcomes[part] = run_part(part, options, share, tiny)
        fill(report, outcomes)
        save_report(report, ["gpu", "--device", options.device, "--minutes", f"{options.minutes:g}"], folder)
    return report


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    """Return the benchmarks to run: those of ``--only``, else all that run on ``--device``.

    Raises:
        UsageError: ``--only`` names a benchmark that is not in the list, or does not run on the device.
    """
    on_cuda = options.device.startswith("cuda")
    known = {part.name: part for part in PARTS if on_cuda or part.name not in ON_CUDA_ONLY}
    if options.only is None:
        return list(known.values())
    names = options.only.split(",")
    for name in names:
        if name not in known:
            raise UsageError(f"--only {name}: not a benchmark of the list on {options.device}: {', '.join(known)}")
    return [known[name] for name in names]


def run_part(part: Part, options: argparse.Namespace, limit: float, tiny: bool = False) -> Outcome:
    """Run one benchmark in a process of its own, for at most `limit` seconds, and return how it ended.

    With `tiny` it runs with tiny sizes, and only its limits and notes are kept: its own result would take the place of
    one with full sizes.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) if tiny else options.results or (Path(scratch) if options.quick else results_folder())
        ended = _ended(_command(part, options, results, options.quick or tiny), limit)
        seconds = time.monotonic() - begun
        if ended is not None:
            return Outcome(ended, seconds, tiny=tiny)
        (kept,) = (path for path in _results_of(part, options, results))
        found = json.loads(kept.read_text())
    return Outcome("done", seconds, found["limits"], found["notes"], tiny)


def _command(part: Part, options: argparse.Namespace, results: Path, quick: bool) -> list[str]:
    own = [*part.arguments, *(["--quick"] if quick else part.full)]
    common = ["--device", options.device, "--rounds", str(options.rounds), "--seed", str(options.seed)]
    common += ["--workdir", str(options.workdir), "--results", str(results)]
    if options.threads is not None:
        common += ["--threads", str(options.threads)]
    return [sys.executable, "-m", __package__, part.name, *own, *common]


def _ended(command: list[str], limit: float) -> str | None:
    """Run `command` and return why it gave no result; None if it did. At `limit` seconds its processes are killed."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_of_children(),
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # ended, with all that it started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        return f"failed (exit {process.returncode}): {errors.strip().rpartition(chr(10))[2]}"
    return None


def _results_of(part: Part, options: argparse.Namespace, folder: Path) -> list[Path]:
    from .harness.store import result_path

    return [result_path(Report(part.name.replace("-", "_"), options.device), folder)]


def fill(report: Report, outcomes: dict[Part, Outcome]) -> None:
    """Write the outcomes so far into `report`: a table of benchmarks, one of their limits, and what is not measured."""
    rows: list[list[Cell]] = []
    report.limits = []
    report.notes = [f"not measured on this host: {missing}" for missing in missing_counters()]
    for part, outcome in outcomes.items():
        missed = sum(not limit["kept"] for limit in outcome.limits)
        ended, name = outcome.ended, part.name
        if outcome.tiny:
            ended, name = f"{ended}, with tiny sizes: too little time was left", f"{part.name} with tiny sizes"
        rows.append([part.name, part.shows, ended, outcome.seconds, len(outcome.limits) - missed, missed])
        for limit in outcome.limits:
            fields = {each: limit[each] for each in ("measured", "relation", "bound", "unit")}
            report.limits.append(Limit(f"{name}: {limit['what']}", **fields))
        report.notes += [f"{name}: {note}" for note in outcome.notes]
    columns = [Column("benchmark"), Column("shows"), Column("ended"), Column("took", "seconds")]
    columns += [Column("limits kept", "count"), Column("missed", "count")]
    report.tables = [Table("What was run, in this order", columns, rows)]


def _check_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise BenchmarkError("PyTorch finds no CUDA device; --device virtual runs the same list without one")
