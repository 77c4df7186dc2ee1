"""Running tests that others wrote, and counting how they ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from .accelerate import FOLDER, ROOT

PLUGINS = Path(__file__).parent / "plugins"


def distribution(package: str) -> Path:
    """Return the folder with the tests of the version of a package that is installed, fetched if necessary."""
    name = f"{package}-{version(package)}"
    folder = FOLDER / name
    if not folder.is_dir():
        FOLDER.mkdir(parents=True, exist_ok=True)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*fetch, "--dest", str(FOLDER), name.replace("-", "==")], check=True)
        with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
            inside = [member for member in archive if member.name.startswith(f"{name}/tests/")]
            archive.extractall(FOLDER, inside, filter="data")
    return folder


@dataclass
class Outcome:
    """How cases ended.

    Attributes:
        passed: Names of cases, as FILE::CLASS::CASE.
        skipped: Why, by name.
        failed: The last line of the error, by name.
    """

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def run_cases(folder: Path, plugin: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Outcome:
    """Run pytest in `folder` with a plugin of `plugins`, and return how the cases ended.

    Raises:
        RuntimeError: pytest has run no case; the message is the end of what it wrote.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(PLUGINS), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.xml"
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:schemathesis",
            "-o",
            "addopts=",
            "-o",
            "log_cli=0",
            "--continue-on-collection-errors",
        ]
        command = [sys.executable, "-m", "pytest", *options, "-p", plugin, f"--junitxml={report}", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        outcome = _read(report) if report.is_file() else Outcome()
    if not (outcome.passed or outcome.skipped or outcome.failed):
        raise RuntimeError(f"pytest ran no case (exit {done.returncode}): {(done.stdout + done.stderr)[-3000:]}")
    return outcome


def _read(report: Path) -> Outcome:
    outcome = Outcome()
    for case in xml.parse(report).iter("testcase"):
        name = "::".join([*case.get("classname", "").split(".")[-2:], case.get("name", "")])
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if problem is not None:
            outcome.failed[name] = problem.get("message", "").partition("\n")[0]
        elif skipped is not None:
            outcome.skipped[name] = skipped.get("message", "")
        else:
            outcome.passed.append(name)
    return outcome


def told(what: str, outcome: Outcome, reasons: Mapping[str, str], by_error: Mapping[str, str] | None = None) -> int:
    """Print how cases ended, a line for each that failed; return how many failed without a reason.

    Args:
        what: What was run.
        reasons: Why cases may fail, by name.
        by_error: Why cases may fail, by a part of the error.
    """
    of_error = {
        name: reason
        for part, reason in (by_error or {}).items()
        for name, error in outcome.failed.items()
        if part in error
    }
    reasons = {**of_error, **reasons}
    unexplained = outcome.failed.keys() - reasons.keys()
    print(f"{what}: {len(outcome.passed)} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped")
    for name, error in outcome.failed.items():
        print(f"  {name}: {reasons.get(name) or f'NO REASON: {error}'}", flush=True)
    return len(unexplained)
