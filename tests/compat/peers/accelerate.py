"""Runs accelerate's own tests, word for word, under the stand-in: `python -m tests.compat.peers.accelerate`.

The source distribution is fetched from the package index when it is not there; nothing of it is kept in the repository.
Exits with 1 if a test fails that has no reason in `reasons`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from .reasons import REASON_OF

VERSION = "1.15.0"
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "compat"
FILES = (
    *("hooks", "big_modeling", "modeling_utils", "offload", "memory_utils"),
    *("accelerator", "data_loader", "state_checkpointing", "kwargs_handlers", "grad_sync", "scheduler", "optimizer"),
)


def source() -> Path:
    """Return the folder of accelerate's source, fetched if necessary. ``ACCELERATE_SOURCE`` names one that is there."""
    given = os.environ.get("ACCELERATE_SOURCE")
    if given:
        return Path(given)
    folder = FOLDER / f"accelerate-{VERSION}"
    if not folder.is_dir():
        FOLDER.mkdir(parents=True, exist_ok=True)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*fetch, "--no-build-isolation", "--dest", str(FOLDER), f"accelerate=={VERSION}"], check=True)
        with tarfile.open(FOLDER / f"accelerate-{VERSION}.tar.gz") as archive:
            archive.extractall(FOLDER, filter="data")
    return folder


def run(name: str, folder: Path) -> tuple[int, int, list[str]]:
    """Run one file of tests; return how many passed and were skipped, and the names of those that failed."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "ACCELERATE_SOURCE": str(folder),
        "HF_HUB_OFFLINE": "1",
    }
    # The folder may lie in this checkout, whose settings for pytest are not accelerate's.
    options = ["-c", os.devnull, "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    options += ["-p", "tests.compat.peers.plugin"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(folder), f"tests/test_{name}.py"]
    output = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True).stdout
    failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+?\.py)(?:::(?:\w+::)*(\w+))?", output, re.MULTILINE)
    return _count("passed", output), _count("skipped", output), [f"{file}::{test}" for file, test in failed]


def _count(what: str, output: str) -> int:
    found = re.findall(rf"(\d+) {what}", output)
    return int(found[-1]) if found else 0


def main(names: list[str]) -> int:
    folder = source()
    total, ended, unexplained = 0, 0, []
    for name in names or FILES:
        passed, skipped, failed = run(name, folder)
        total, ended = total + passed, ended + passed + len(failed)
        print(f"{name}: {passed} passed, {len(failed)} failed, {skipped} skipped (no GPU, or a package is missing)")
        for test in failed:
            print(f"  {test}: {REASON_OF.get(test, 'NO REASON')}", flush=True)
        unexplained += [test for test in failed if test not in REASON_OF]
        if not passed + skipped + len(failed):
            print(f"  {name}: NO TEST RAN")
            unexplained.append(name)
    print(f"accelerate {VERSION}: {total} of {ended} passed; {len(unexplained)} failed without a reason")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
