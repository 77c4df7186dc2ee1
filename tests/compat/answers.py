"""Running a program of `programs` and reading its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def answers(program: str, *arguments: str, before: tuple[str, ...] = (), **environment: str) -> dict[str, Any]:
    """Run ``python BEFORE... PROGRAM ARGUMENTS...`` and return its answers by question."""
    path = Path(__file__).parent / "programs" / f"{program}.py"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *before, str(path), *arguments]
    done = subprocess.run(command, env={**variables, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return dict(lines)
