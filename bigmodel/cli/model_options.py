"""Options that several commands share: which model, how it is loaded, and where its parts may lie."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

_OFFLOAD = typer.Option(
    help="What does not fit the accelerator is brought there (stream), computed on the CPU (compute), or either (auto)."
)
_OFFLOAD_DTYPE = typer.Option(help="int8 or int4: what is brought to the accelerator travels quantised; not exact.")
_OFFLOAD_FOLDER = typer.Option(
    help="Where weights for the disk are written that no file holds as they are wanted, as quantised ones."
)
_DRAFT = typer.Option(help="A small model of the same tokenizer that guesses tokens ahead.")

Model: TypeAlias = Annotated[str, typer.Argument(help="A folder with a checkpoint, or a Hub id.")]
Revision: TypeAlias = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
RemoteCode: TypeAlias = Annotated[bool, typer.Option(help="Run code that comes with the model.")]
DType: TypeAlias = Annotated[str, typer.Option(help="What the weights are loaded as; auto: as stored.")]
Budgets: TypeAlias = Annotated[str | None, typer.Option(help="Budget per device, as in 0=10GiB,cpu=8GiB.")]
DeviceMap: TypeAlias = Annotated[str, typer.Option(help="Strategy, or one device for everything.")]
Offload: TypeAlias = Annotated[str, _OFFLOAD]
OffloadDType: TypeAlias = Annotated[str | None, _OFFLOAD_DTYPE]
OffloadFolder: TypeAlias = Annotated[str | None, _OFFLOAD_FOLDER]
DraftModel: TypeAlias = Annotated[str | None, _DRAFT]
BatchSize: TypeAlias = Annotated[int, typer.Option(min=1, help="Sequences at once.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
