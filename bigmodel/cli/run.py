"""`bigmodel run`: run a program in which `import accelerate` is this project."""

from __future__ import annotations

from typing import Any

import typer

# Everything from the program's name on belongs to the program, `--help` included.
CONTEXT_SETTINGS: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


def run(
    context: typer.Context,
    module: bool = typer.Option(False, "--module", "-m", help="The program is a module, as for `python -m`."),
    report: bool = typer.Option(False, "--report", help="At the end, print what was changed, planned and fell back."),
    batch_size: int | None = typer.Option(
        None, min=1, help="Sequences per batch that models are planned for. Default: 1."
    ),
    tokens: int | None = typer.Option(
        None, "--context", min=1, help="Final length of a sequence, in tokens, that models are planned for."
    ),
) -> None:
    """Run a program in which bigmodel stands in for accelerate: bigmodel run [flags] script.py [script flags]."""
    from ..compat.run import run_program

    arguments = list(context.args)
    if not arguments:
        raise typer.BadParameter("no program given: bigmodel run script.py, or bigmodel run -m module")
    run_program(
        arguments[0],
        arguments[1:],
        module=module,
        report_at_exit=report,
        batch_size=batch_size,
        context_length=tokens,
    )
