"""Runs one of accelerate's scripts, word for word, under the stand-in: `[--call NAMES] SCRIPT ARGUMENTS...`.

With ``--call`` these functions of it are called, separated by commas, instead of its main part. The environment
variable ``ACCELERATE_SOURCE`` names the folder of accelerate's source, which has the helpers that scripts import.
"""

from __future__ import annotations

import runpy
import sys

from tests.compat.peers import plugin

__all__ = ["plugin"]  # importing it installs, and provides the helpers


def main() -> None:
    """Run the script."""
    names = sys.argv[2].split(",") if sys.argv[1] == "--call" else []
    script, *arguments = sys.argv[3:] if names else sys.argv[1:]
    sys.argv = [script, *arguments]
    found = runpy.run_path(script, run_name="called" if names else "__main__")
    for name in names:
        found[name]()


if __name__ == "__main__":
    main()
