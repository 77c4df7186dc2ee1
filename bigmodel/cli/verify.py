"""`bigmodel verify`: compares the memory and time that a plan predicts with measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .model_options import AsJson, BatchSize, Budgets, DType, Model
from .tables import print_tables

if TYPE_CHECKING:
    from rich.table import Table

    from bigmodel.verify.verify import Finding


def verify(
    model: Model,
    max_memory: Budgets = None,
    dtype: DType = "auto",
    batch_size: BatchSize = 1,
    context: Annotated[
        int | None, typer.Option(min=2, help="Final length of a sequence, in tokens.", show_default="256, if allowed")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="How many of these are generated.")] = 1,
    objective: Annotated[str, typer.Option(help="latency, throughput or fit.")] = "latency",
    offload: Annotated[
        str, typer.Option(help="Weights that do not fit: stream, compute (on the CPU), or auto: the faster.")
    ] = "stream",
    tolerance: Annotated[float, typer.Option(min=0, help="Tolerated relative error of memory.")] = 0.02,
    time_tolerance: Annotated[
        float, typer.Option(min=0, help="Tolerated relative error of time, beyond the spread of the runs.")
    ] = 0.2,
    as_json: AsJson = False,
) -> None:
    """Load MODEL by plan, run the planned shapes, and print predicted beside measured.

    Exits 1 past the tolerance of memory. Time depends on what else the machine does: an error past its tolerance and
    the spread of the measured runs is reported, and does not change the exit code.
    """
    import json
    from dataclasses import asdict

    from bigmodel.server.loading import parse_max_memory
    from bigmodel.verify.verify import verify as run

    found, findings = run(
        model,
        parse_max_memory(max_memory),
        batch_size=batch_size,
        context_length=context,
        new_tokens=new_tokens,
        dtype=dtype,
        objective=objective,
        offload=offload,
    )
    if as_json:
        typer.echo(json.dumps([{**asdict(each), "error": each.error} for each in findings], indent=1))
    else:
        print_tables(findings_table(findings))
        for note in found.notes:
            typer.echo(f"note: {note}")
    for each in findings:
        if each.unit == "seconds":
            typer.echo(time_verdict(each, time_tolerance), err=True)
    if any(each.is_past(tolerance) for each in findings if each.unit == "bytes"):
        typer.echo("memory is past the tolerance", err=True)
        raise typer.Exit(1)


def time_verdict(found: Finding, tolerance: float) -> str:
    """Return one line on a predicted time: right, wrong, or not to be told from how much the runs varied."""
    said = f"time of {found.what}: error {found.error:+.0%}, runs varied by {found.spread:.0%}"
    if abs(found.error) <= tolerance:
        return f"{said}: within the tolerance of {tolerance:.0%}"
    if abs(found.error) <= tolerance + found.spread:
        return f"{said}: past the tolerance of {tolerance:.0%}, but not by more than the spread of the runs"
    return f"{said}: past the tolerance of {tolerance:.0%} and the spread of the runs"


def findings_table(findings: list[Finding]) -> Table:
    """Return predicted beside measured."""
    from rich.table import Table

    from bigmodel.devices import format_size

    drawn = Table()
    for name in ("device", "what", "predicted", "measured", "error"):
        drawn.add_column(name, justify="left" if name in ("device", "what") else "right")
    for each in findings:
        shown = [
            format_size(int(value)) if each.unit == "bytes" else f"{1e3 * value:.2f} ms"
            for value in (each.predicted, each.measured)
        ]
        drawn.add_row(each.device, each.what, *shown, f"{each.error:+.2%}")
    return drawn
