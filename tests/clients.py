"""Run the tests of `tests/server/clients` with the clients that they are about.

    python tests/clients.py [pytest arguments]

The clients are in environments of their own, `.venv-clients` and one for each that cannot be beside the others;
everything else is found in `.venv`, which `make test` makes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/server/clients"

ENVIRONMENTS: dict[str, tuple[list[str], list[str]]] = {
    ".venv-clients": (
        [
            "guidellm",
            "instructor",
            "langchain-openai",
            "litellm",
            "llm",
            "lm-eval[api]",
            "openai-agents",
            "pydantic-ai-slim[openai]",
        ],
        [TESTS],
    ),
    # It needs openai 2; others need openai 3.
    ".venv-clients-llama-index": (
        ["llama-index-llms-openai-like>=0.8", "llama-index-embeddings-openai-like>=0.4"],
        [f"{TESTS}/test_llama_index.py"],
    ),
}
"""By folder, what pip is asked for, and the tests that are run with it."""


def environment(name: str, packages: list[str]) -> str:
    """Return the Python of the environment, made first if it is not there."""
    folder = ROOT / name
    python = str(folder / "bin" / "python")
    ready = folder / ".ready"
    wanted = "\n".join(packages)
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (base,) = (ROOT / ".venv").glob("lib/python*/site-packages")
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "test-environment.pth").write_text(f"{base}\n")  # what is there is not installed again
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *packages], check=True)
        ready.write_text(wanted)
    return python


def main(*arguments: str) -> int:
    """Run the tests in each environment and return the first exit code of pytest that is not 0."""
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    codes = []
    for name, (packages, tests) in ENVIRONMENTS.items():
        options = ["-p", "no:cacheprovider", "-W", "ignore", "-rs"]
        command = [environment(name, packages), "-m", "pytest", *tests, *options, *arguments]
        codes.append(subprocess.run(command, env=paths, cwd=ROOT, check=False).returncode)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
