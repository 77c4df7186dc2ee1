"""Runs a program in this process as its main module, with the stand-in installed before it."""

from __future__ import annotations

import atexit
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import CompatError
from .reporting import report
from .stand_in import install


def run_program(program: str, arguments: Sequence[str], *, module: bool = False, report_at_exit: bool = False) -> None:
    """Run a script, or with `module` a module, as Python would.

    Args:
        program: Path of the script, or name of the module.
        arguments: The program's own.
        report_at_exit: Print the report to standard error when the process ends.

    Raises:
        CompatError: There is no such script, or `install` comes too late.
    """
    if not module and not Path(program).exists():
        raise CompatError(f"the script {program} does not exist")
    install()
    if report_at_exit:
        atexit.register(lambda: print(report(), file=sys.stderr))
    sys.argv = [program, *arguments]
    if module:
        sys.path[0:0] = [""] if "" not in sys.path else []
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
