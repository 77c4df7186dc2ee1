"""Lets a model on meta hold its weights as a quantised checkpoint stores them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ...checkpoint.checkpoint import Checkpoint
from ...errors import CheckpointNotFoundError
from ...quantized.recognise import quantization_config
from ...quantized.replace import use_stored_weights
from ...quantized.stored import StoredModule, published
from ...sources.resolve import open_source


def hold_as_stored(model: nn.Module, checkpoint: str | Path, dtype: torch.dtype | None = None) -> None:
    """Replace the modules of `model` whose weights `checkpoint` stores quantised, unless they are replaced already.

    Args:
        model: a model on meta.
        checkpoint: its folder, or a file in that.
        dtype: dtype that weights are restored to; None: that of the model.

    Raises:
        CheckpointFormatError: the format is not supported, or the weights do not fit the model, which is unchanged.
    """
    if published(model) is not None:
        return
    try:
        content = open_source(checkpoint).config_dict()
    except CheckpointNotFoundError:
        return  # without a config all weights are as they are
    if quantization_config(content) is None:
        return
    saved = Checkpoint.open(checkpoint)
    entries = {name: saved.entry(name) for name in saved}
    use_stored_weights(model, content, entries, str(checkpoint), read=lambda entry: saved[entry.name])
    if dtype is not None:
        for module in model.modules():
            if isinstance(module, StoredModule):
                module.compute_dtype = dtype
