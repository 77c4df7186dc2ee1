"""The `bigmodel` command, interrupted at the moment it imports a module for the first time.

    python tests/cli/interrupted.py MODULE ARGUMENTS OF bigmodel

Standard library only: what the command imports is imported by the command.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


class Interrupting(MetaPathFinder):
    """Finds nothing, but sends this process a Ctrl-C when it is asked for a module."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> None:
        """See the class."""
        if name == self.module:
            self.module = ""
            os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    module, *arguments = sys.argv[1:]
    sys.path[0] = os.getcwd()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what shells start in the background ignores it
    sys.meta_path.insert(0, Interrupting(module))
    # As the installed executable does.
    from bigmodel.cli.main import main

    sys.exit(main(arguments))
