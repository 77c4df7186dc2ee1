"""Runs a program in this process as its main module, with the stand-in installed before it."""

from __future__ import annotations

import atexit
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ..errors import CompatError
from .reporting import report
from .stand_in import install
from .workload import set_workload


def run_program(
    program: str,
    arguments: Sequence[str],
    *,
    module: bool = False,
    report_at_exit: bool = False,
    batch_size: int | None = None,
    context_length: int | None = None,
) -> None:
    """Run a script, or with `module` a module, as Python would.

    Args:
        program: Path of the script, or name of the module.
        arguments: The program's own.
        report_at_exit: Print the report to standard error when the process ends.
        batch_size: Sequences that models are planned for; None: what the environment says.
        context_length: Tokens of each, likewise.

    Raises:
        CompatError: There is no such script, or `install` comes too late.
        ImportError: There is no such module.
        SystemExit: The program raised an exception, which was shown as Python shows it, or it has called `sys.exit`.
    """
    if not module and not Path(program).exists():
        raise CompatError(f"the script {program} does not exist")
    set_workload(batch_size, context_length)
    install()
    if report_at_exit:
        atexit.register(lambda: print(report(), file=sys.stderr))
    sys.argv = [program, *arguments]
    try:
        if module:
            sys.path[0:0] = [""] if "" not in sys.path else []
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program).resolve().parent))
            runpy.run_path(program, run_name="__main__")
    except Exception as error:
        inside = _inside_program(error.__traceback__)
        if inside is None and isinstance(error, ImportError):
            raise  # there is no such module to run
        # As Python does; the command would take the program's errors for its own, and show some without their place.
        sys.excepthook(type(error), error.with_traceback(inside), inside)
        raise SystemExit(1) from None


def _inside_program(frames: TracebackType | None) -> TracebackType | None:
    """Return what of a traceback is inside the program: what is left without the frames that started it."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        frames = frames.tb_next
    return frames
