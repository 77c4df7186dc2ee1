"""The names of ``accelerate.utils.bnb``: layers of bitsandbytes, with which transformers loads models."""

from __future__ import annotations

import torch
from torch import nn

from bigmodel.compat.refused import BITSANDBYTES, refused
from bigmodel.profile import find_tied_parameters

get_quantized_model_device_map = refused("get_quantized_model_device_map", BITSANDBYTES)
load_and_quantize_model = refused("load_and_quantize_model", BITSANDBYTES)
quantize_and_offload_8bit = refused("quantize_and_offload_8bit", BITSANDBYTES)
replace_with_bnb_layers = refused("replace_with_bnb_layers", BITSANDBYTES)


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the names of modules that are best kept in full precision: the head, and what shares its weights.

    A model without a head and without tied weights has none.
    """
    tied = {name for group in find_tied_parameters(model) for name in group}
    base = getattr(model, "base_model_prefix", None)
    if not tied and base is not None and not hasattr(model, base):
        return []
    children = [name for name, _ in model.named_children()]
    return [_without_ending(name) for name in sorted(tied | set(children[-1:]))]


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(parameter.parameters()).device


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a layer of `model` is one of bitsandbytes with 4 bits.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    from bitsandbytes.nn.modules import Linear4bit

    return any(isinstance(module, Linear4bit) for module in model.modules())


def _without_ending(name: str) -> str:
    for ending in (".weight", ".bias"):
        name = name.replace(ending, "")
    return name
