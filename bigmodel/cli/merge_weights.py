"""`bigmodel merge-weights`: one set of weights from a sharded training checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..limits import SHARD_SIZE


def merge_weights(
    checkpoint_directory: Annotated[Path, typer.Argument(help="Folder with the sharded weights.")],
    output_path: Annotated[Path, typer.Argument(help="Folder to write the merged weights to.")],
    unsafe_serialization: Annotated[
        bool,
        typer.Option("--unsafe_serialization", "--unsafe-serialization", help="Write .bin files, not safetensors."),
    ] = False,
    remove_checkpoint_dir: Annotated[
        bool,
        typer.Option(
            "--remove_checkpoint_dir", "--remove-checkpoint-dir", help="Delete the sharded weights afterwards."
        ),
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option("--max_shard_size", "--max-shard-size", help="Largest file written, like 5GB.")
    ] = SHARD_SIZE,
) -> None:
    """Merge the sharded weights of an FSDP training checkpoint; memory needed: one output file."""
    from ..train.strategies.sharded.merge import merge_fsdp_weights

    written = merge_fsdp_weights(
        checkpoint_directory,
        output_path,
        safe_serialization=not unsafe_serialization,
        remove_checkpoint_dir=remove_checkpoint_dir,
        max_shard_size=max_shard_size,
    )
    typer.echo(f"Merged weights written to {written}")
