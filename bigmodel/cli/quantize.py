"""`bigmodel quantize`: a quantised checkpoint, in a published format, from a full one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .model_options import Model, Revision


def quantize(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    to: Annotated[str, typer.Option(help="int4, int8, fp8 or mxfp4.")],
    group_size: Annotated[
        int | None, typer.Option(help="Elements that share a scale, of int4: 32, or 128, the default.")
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option(help="Memory for what is being written, as 4GiB. Default: shards of 5 GB.")
    ] = None,
    revision: Revision = None,
) -> None:
    """Quantise the linear layers and experts of MODEL; write it to OUT with its tokenizer.

    Weights are rounded to the nearest value; no data is calibrated with. Embeddings, heads, routers and norms stay as
    they are. OUT is a checkpoint of compressed-tensors, or of gpt-oss's own form, that other libraries load too.
    """
    from bigmodel.checkpoint.quantize import quantize_checkpoint
    from bigmodel.devices import format_size

    found = quantize_checkpoint(model, out, to, group_size, max_memory, revision)
    for name in found.kept:
        typer.echo(f"{name} stays as it is: its rows are no multiple of the groups", err=True)
    typer.echo(
        f"{found.folder}: {found.weights} weights quantised to {to}, "
        f"{format_size(found.before)} became {format_size(found.after)}"
    )
