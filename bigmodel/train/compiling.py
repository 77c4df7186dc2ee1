"""torch.compile for whole models, or for each repeated block once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bigmodel.train.configuration import TorchDynamoPlugin


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Compile a model as the plugin says."""
    kwargs = plugin.compile_kwargs()
    if not plugin.use_regional_compilation:
        return torch.compile(model, **kwargs)  # type: ignore[return-value]
    return compile_regions(model, **kwargs)


def compile_regions(model: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile, in place, each block of every `ModuleList` of blocks of one class; a model without any, whole.

    Blocks of one class share their compiled code, so that the time to compile does not grow with depth.
    """
    found = False
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1:
            found = True
            for block in module:
                block.compile(**compile_kwargs)
    return model if found else torch.compile(model, **compile_kwargs)  # type: ignore[return-value]
