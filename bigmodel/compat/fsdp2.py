"""The steps by which accelerate shards a model with FSDP2, for callers that take them one by one."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import TrainError
from ..train.accelerator.core import Accelerator
from ..train.strategies.sharded.fsdp import FullyShardedDataParallel, units_of
from .regions import get_module_children_bottom_up


def enable_fsdp_ram_efficient_loading() -> None:
    """Have transformers load checkpoints on the first rank alone, in this process and in those that it starts."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Have transformers load checkpoints on every rank."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], nn.Module], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], nn.Module]:
    """Return a `param_init_fn` that ties again what `model` ties by ``_tied_weights_keys``, as it makes new parameters.

    Without such names it is the function itself.
    """
    names: Iterable[str] = getattr(model, "_tied_weights_keys", None) or ()
    first: dict[int, Any] = {id(model.get_parameter(name)): None for name in names}
    if not first:
        return param_init_fn

    def initialise(module: nn.Module) -> nn.Module:
        tied: defaultdict[int, list[str]] = defaultdict(list)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in first:
                tied[id(parameter)].append(name)
        module = param_init_fn(module)
        for key, own in tied.items():
            for name in own:
                if first[key] is None:
                    first[key] = getattr(module, name)
                else:
                    setattr(module, name, first[key])
        return module

    return initialise


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Return what says which modules of `model` are sharded as one; None if the plugin wraps none.

    Raises:
        TrainError: The plugin names classes that the model does not have.
    """
    if fsdp2_plugin.auto_wrap_policy in (None, "NO_WRAP"):
        return None
    chosen = {id(module) for module in units_of(model, fsdp2_plugin)}

    def policy(module: nn.Module) -> bool:
        return id(getattr(module, "_checkpoint_wrapped_module", module)) in chosen

    return policy


def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Wrap the modules that are sharded as one so that their activations are computed again in backward.

    Returns:
        `model`, changed in place.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    plugin = _strategy(accelerator).plugin
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    for name, module in get_module_children_bottom_up(model, return_fqns=True)[:-1]:
        if policy is not None and policy(module):
            wrapped = checkpoint_wrapper(module, preserve_rng_state=False)
            model.set_submodule(name, offload_wrapper(wrapped) if plugin.activation_checkpointing_offload else wrapped)
    return model


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard `model` in place as the plugin of `accelerator` says, and return it. A sharded one stays as it is."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        return model
    return _strategy(accelerator).prepare_model(model, device_placement=True, evaluation_mode=False)


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Load whole weights that the first rank has into a sharded model; the others' `full_sd` is not read.

    Args:
        cpu_offload: Keep the parts on the host.

    Returns:
        `model`.

    Raises:
        KeyError: On the first rank, a parameter is missing.
    """
    from torch import distributed as dist
    from torch.distributed.tensor import distribute_tensor

    sharded: dict[str, Any] = {}
    for name, part in model.state_dict().items():
        mesh = part.device_mesh
        if accelerator.is_main_process:
            if name not in full_sd:
                raise KeyError(f"{name} is a parameter of the sharded model and not among the {len(full_sd)} weights")
            whole = full_sd[name].detach().to(device=mesh.device_type, dtype=part.dtype).contiguous()
        else:
            whole = torch.empty(part.size(), device=mesh.device_type, dtype=part.dtype)
        dist.broadcast(whole, src=0)
        made = distribute_tensor(whole, mesh, part.placements)
        sharded[name] = made.to("cpu") if cpu_offload else made
    model.load_state_dict(sharded, assign=True)
    return model


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, Any]) -> None:
    """Have an optimizer step other parameters.

    Args:
        mapping: The new parameter by the ``data_ptr`` of the old one, as accelerate keeps it.

    Raises:
        KeyError: A parameter of the optimizer has none.
    """
    for group in optimizer.param_groups:
        lost = [index for index, parameter in enumerate(group["params"]) if parameter.data_ptr not in mapping]
        if lost:
            raise KeyError(f"parameters {lost} of the optimizer have no sharded ones: they would not be trained")
        group["params"] = [mapping[parameter.data_ptr] for parameter in group["params"]]


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters under the names that they had before modules were compiled or wrapped."""
    return {_plain(name): parameter for name, parameter in named_params.items()}


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler. Its arguments are those of `torch.amp.GradScaler`."""
    return torch.amp.GradScaler(**kwargs)


def _plain(name: str) -> str:
    name = name.replace("._checkpoint_wrapped_module", "")
    if name.startswith("_orig_mod."):
        name = name.replace("_orig_mod.", "")
    return name.replace("._orig_mod", "")


def _strategy(accelerator: Accelerator) -> FullyShardedDataParallel:
    strategy = accelerator.strategy
    if not isinstance(strategy, FullyShardedDataParallel):
        raise TrainError("this function shards models with FSDP; this Accelerator has no FSDP plugin")
    return strategy
