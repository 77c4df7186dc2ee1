"""A model being trained on fake tensors, and what it is trained with."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import PlanError
from .clone import fake_clone
from .usage import image_shape


def trainable_clone(model: nn.Module, mode: FakeTensorMode, device: torch.device, checkpointing: bool) -> Any:
    """Return a fake copy in training mode, that asks for the gradients that `model` asks for.

    Args:
        model: any module, also on meta; not changed.
        mode: the mode the fake tensors belong to.
        device: where they pretend to be.
        checkpointing: blocks keep their inputs alone, and run again in the backward.

    Raises:
        PlanError: the model cannot run its blocks again.
    """
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    clone: Any = fake_clone(model, mode, device, {}).train()
    for parameter, asks in zip(clone.parameters(), wanted, strict=True):
        parameter.requires_grad_(asks and parameter.is_floating_point())
    if checkpointing:
        if not getattr(clone, "supports_gradient_checkpointing", False):
            raise PlanError(f"{type(model).__name__} cannot recompute its blocks; leave checkpointing off")
        # Renamed in transformers 5.
        getattr(clone, "activation_checkpointing_enable", clone.gradient_checkpointing_enable)()
    return clone


def training_inputs(model: nn.Module, batch_size: int, tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return inputs and labels by name, of texts (batch, tokens) or of images, for a transformers model.

    Args:
        model: what they are for.
        batch_size: samples.
        tokens: of each, for a model of texts.
        device: where they are.

    Raises:
        PlanError: the model takes no labels, or neither texts nor images.
    """
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if "labels" not in inspect.signature(model.forward).parameters or config is None:
        raise PlanError(f"{type(model).__name__} takes no labels; give a transformers model with a loss")
    if name == "pixel_values":
        dtype = next(p.dtype for p in model.parameters())
        labels = torch.zeros(batch_size, dtype=torch.long, device=device)
        return {name: torch.zeros(batch_size, *image_shape(config), dtype=dtype, device=device), "labels": labels}
    if name != "input_ids":
        raise PlanError(f"{type(model).__name__} takes {name!r}; texts and images are followed in training")
    ids = torch.zeros(batch_size, tokens, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}
