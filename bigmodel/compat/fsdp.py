"""Saving and loading of sharded models by accelerate's functions, for callers that hold a plugin and an Accelerator."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import TrainError
from ..train.accelerator.core import Accelerator
from ..train.checkpoint_files import numbered
from ..train.strategies.sharded.strategy import ShardedFiles


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of a prepared model as the plugin says: shards of every rank, or one file of rank 0.

    Args:
        adapter_only: Write the adapters of a model of peft only, in one file.
        use_dcp: Accepted for compatibility; shards are always in the format of torch.distributed.checkpoint.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if adapter_only and hasattr(model, "peft_config"):
        _save_adapter(accelerator, model, folder)
    elif _sharded(accelerator).writes_shards:
        accelerator.strategy.save_model(model, folder, model_index)
    else:
        _sharded(accelerator).save_gathered(model, folder / numbered(_WHOLE, model_index))
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read the weights of a prepared model from what `save_fsdp_model` wrote."""
    if adapter_only and hasattr(model, "peft_config"):
        return _load_adapter(model, Path(input_dir))
    if _sharded(accelerator).writes_shards:
        return accelerator.strategy.load_model(model, Path(input_dir), model_index)
    return _sharded(accelerator).load_gathered(model, Path(input_dir) / numbered(_WHOLE, model_index))


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of a prepared optimizer, as `save_fsdp_model` does weights."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    accelerator.strategy.save_optimizer(_inner(optimizer), model, folder, optimizer_index)
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read the state of a prepared optimizer from what `save_fsdp_optimizer` wrote."""
    accelerator.strategy.load_optimizer(_inner(optimizer), model, Path(input_dir), optimizer_index)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Return the parameters of `modules`, moved to `device`; a text is a regular expression of their whole names."""
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules for parameter in module.to(device).parameters()}


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


_WHOLE = "pytorch_model_fsdp.bin"
_ADAPTER = "pytorch_model_fsdp_adapter.bin"


def _sharded(accelerator: Accelerator) -> ShardedFiles:
    strategy = accelerator.strategy
    if not isinstance(strategy, ShardedFiles):
        raise TrainError("these functions save and load models that FSDP shards; this Accelerator has no FSDP plugin")
    return strategy


def _save_adapter(accelerator: Accelerator, model: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    full = accelerator.get_state_dict(model, unwrap=False)
    if accelerator.is_main_process:
        torch.save(get_peft_model_state_dict(model, state_dict=full), folder / _ADAPTER)


def _load_adapter(model: Any, folder: Path) -> Any:
    from peft import set_peft_model_state_dict

    return set_peft_model_state_dict(model, torch.load(folder / _ADAPTER, weights_only=True))
