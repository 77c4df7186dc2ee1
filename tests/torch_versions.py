"""Run the fast tests of planning and dispatching with the oldest or the newest PyTorch that pyproject.toml allows.

    python tests/torch_versions.py oldest|newest [pytest arguments]

An environment of its own, `.venv-oldest` or `.venv-newest`, holds PyTorch with what it needs, several gigabytes if pip
offers a CUDA build; everything else is found in `.venv`, which `make test` makes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ["tests/plan", "tests/devices", "tests/profile", "tests/dispatch"]


def requirement(which: str) -> str:
    """Return what pip is asked for."""
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    return f"torch=={oldest[1]}.*" if which == "oldest" else f"torch>={oldest[1]}"


def environment(which: str) -> Path:
    """Return the Python of the environment, made first if it is not there."""
    folder = ROOT / f".venv-{which}"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
        subprocess.run([*pip, requirement(which)], check=True)
        (base,) = (ROOT / ".venv").glob("lib/python*/site-packages")
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "test-environment.pth").write_text(f"{base}\n")
        ready.touch()
    return python


def main(which: str, *arguments: str) -> int:
    """Run the tests and return pytest's exit code."""
    if which not in ("oldest", "newest"):
        raise SystemExit(f"{which!r} is neither oldest nor newest")
    python = str(environment(which))
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([python, "-c", "import torch; print('torch', torch.__version__)"], check=True, env=paths, cwd=ROOT)
    tests = [*ROOMS, "-m", "not slow", "-n", "2", "-p", "no:cacheprovider"]
    return subprocess.run([python, "-m", "pytest", *tests, *arguments], env=paths, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["?"]))
