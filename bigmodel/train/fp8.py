"""Training in fp8 through torchao, where the hardware computes in it."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train.handlers import AORecipeKwargs

_NEEDED = (8, 9)


def check_fp8(device: torch.device) -> None:
    """Raise TrainError, saying what is missing, unless this device can train in fp8 here."""
    missing = []
    if device.type != "cuda":
        missing.append(f"an NVIDIA GPU (this process trains on {device.type})")
    elif torch.cuda.get_device_capability(device) < _NEEDED:
        found = ".".join(str(number) for number in torch.cuda.get_device_capability(device))
        missing.append(f"compute capability 8.9 or above ({torch.cuda.get_device_name(device)} has {found})")
    if find_spec("torchao") is None:
        missing.append("the torchao package (pip install torchao)")
    if missing:
        raise TrainError(f"fp8 needs {' and '.join(missing)}; use mixed_precision='bf16' instead")


def convert_to_fp8(model: nn.Module, device: torch.device, recipe: AORecipeKwargs | None = None) -> nn.Module:
    """Let the model's linear layers compute in fp8, all but the first and the last, in place."""
    check_fp8(device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = recipe or AORecipeKwargs()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    edges = {linear[0], linear[-1]} if linear else set()

    def fits(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or name in edges:
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    config = recipe.config or Float8LinearConfig(**recipe.fields_of_config())
    convert_to_float8_training(model, config=config, module_filter_fn=recipe.module_filter_func or fits)
    return model
