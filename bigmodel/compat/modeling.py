"""Functions of ``accelerate.utils.modeling`` that only code around accelerate's hooks needs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..devices import DeviceLike, torch_device
from ..devices import get_max_memory as budgets_of
from ..errors import DeviceMapError
from .hooks.align import AlignDevicesHook
from .hooks.dispatched import DispatchedHook
from .hooks.model_hook import HOOK

if TYPE_CHECKING:
    from ..profile import DtypeLike
    from ..train.handlers import AutocastKwargs


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Warn of keys of `device_map` that are no part of `model`, and check that each of its tensors has a device.

    Raises:
        DeviceMapError: Tensors have no device; the message names them.
    """
    from ..plan import check_device_map as check_coverage

    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    unknown = sorted(key for key in device_map if key not in known)
    if unknown:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown}", UserWarning, 2
        )
    check_coverage(model, {key: device for key, device in device_map.items() if key in known})


def get_max_memory(max_memory: Mapping[DeviceLike, int | str] | None = None) -> dict[int | str, int]:
    """Return the bytes that may be used of each device, as `bigmodel.get_max_memory` does.

    Sizes given as text become numbers in `max_memory` itself, too: transformers relies on that.
    """
    from ..plan.result.budgets import whole_bytes

    budgets = budgets_of(whole_bytes(max_memory))
    if isinstance(max_memory, MutableMapping):
        sizes = {key: budgets_of({key: size}) for key, size in max_memory.items() if isinstance(size, str)}
        max_memory.update({key: next(iter(size.values())) for key, size in sizes.items()})
    return budgets


def dtype_byte_size(dtype: DtypeLike) -> float:
    """Return the bytes one element of `dtype` takes, as `bigmodel.dtype_byte_size` does; accelerate counts a bit for a
    bool."""
    from ..profile import dtype_byte_size as bytes_of

    return 1 / 8 if dtype == torch.bool else bytes_of(dtype)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are one; no index means index 0."""
    if first_device.type != second_device.type:
        return False
    return first_device.type in ("cpu", "meta") or (first_device.index or 0) == (second_device.index or 0)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a model of transformers, by its configuration or a method of a module, ties parameters; other models do
    not say."""
    if all(kind.__name__ != "PreTrainedModel" for kind in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    ties_words = bool(getattr(text, "tie_word_embeddings", False))
    ties_words = ties_words and getattr(model, "get_output_embeddings", lambda: None)() is not None
    ties_halves = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return ties_words or bool(ties_halves) or any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn of tied parameters that a device map puts on different devices.

    Raises:
        DeviceMapError: A tied parameter has no device.
    """
    from ..profile.model.tensors import owner_of

    for names in tied_params:
        devices = {}
        for name in names:
            owner = owner_of(name, device_map)
            if owner is None:
                raise DeviceMapError(f"the device map gives no device to {name}")
            devices[name] = device_map[owner]
        if len(set(devices.values())) > 1:
            warnings.warn(f"tied parameters are on different devices: {devices}", UserWarning, 2)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that hold no other, from sizes by name: tensors, or modules where no tensor is named."""
    parents = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name and name not in parents]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Return the bytes of a module together with those that share parameters with it, and these by name.

    Args:
        tied_params: Other names of parameters of the module.
        module_size: Its own bytes.
        module_sizes: Bytes by name of module and tensor.
        modules_to_treat: Modules by name, among them those that hold the parameters.
    """
    total, names, modules = module_size, [], []
    for parameter in tied_params:
        name, module = next((n, m) for n, m in modules_to_treat if parameter.startswith(f"{n}."))
        total += module_sizes[name] - module_sizes[parameter]
        names.append(name)
        modules.append(module)
    return total, names, modules


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a hook of `module`, one in a chain too, offloads its weights."""
    hook = getattr(module, HOOK, None)
    hooks = getattr(hook, "hooks", (hook,))
    return any(isinstance(each, AlignDevicesHook) and each.offload for each in hooks)


@contextmanager
def align_module_device(module: nn.Module, execution_device: DeviceLike | None = None) -> Iterator[None]:
    """Within this context the parameters that `module` holds itself are on its execution device.

    Args:
        execution_device: Another device; None: the one of its hook, or where they are if it has none.
    """
    hook = getattr(module, HOOK, None)
    if isinstance(hook, DispatchedHook) or (isinstance(hook, AlignDevicesHook) and hook.offload):
        device = hook.execution_device
        hook.execution_device = device if execution_device is None else execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = device
        return
    from ..utils.models import set_module_tensor_to_device

    stored = dict(module.named_parameters(recurse=False))
    try:
        if execution_device is not None:
            for name in stored:
                set_module_tensor_to_device(module, name, execution_device)
        yield
    finally:
        for name, parameter in stored.items():
            present = module._parameters[name]
            if present is not parameter and present is not None:
                parameter.data.copy_(present)
                module._parameters[name] = parameter


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model with offloaded weights, all on the host; nothing is copied that lies there."""
    return {
        name: value.to("cpu") if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: DeviceLike = "cpu",
) -> dict[str, Any]:
    """Replace the entries of `state_dict` that are `module`'s by its weights, and return the dict.

    Args:
        module_name: The name of one of the weights, with that of the module before it.
        device_to_put_offload: Where weights go that are offloaded; others stay.
    """
    root = module_name.rpartition(".")[0]
    dispatched = isinstance(getattr(module, HOOK, None), DispatchedHook)  # its weights are real wherever they lie
    offloaded = dispatched or has_offloaded_params(module)
    with nullcontext() if dispatched else align_module_device(module, device_to_put_offload if offloaded else None):
        for key, value in module.state_dict().items():
            if f"{root}.{key}" in state_dict:
                state_dict[f"{root}.{key}"] = value.to(torch_device(device_to_put_offload)) if offloaded else value
    return state_dict


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return the autocast of the run's precision; one that does nothing unless `native_amp`."""
    if not native_amp:
        return nullcontext()
    from ..train.accelerator_state import AcceleratorState

    state = AcceleratorState()
    arguments = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
    if state.mixed_precision in dtypes:
        arguments["dtype"] = dtypes[state.mixed_precision]
    return torch.autocast(device_type=state.device.type, **arguments)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler, for sharded gradients if `distributed_type` is FSDP."""
    if distributed_type == "FSDP":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    from ..train.accelerator_state import AcceleratorState

    return torch.amp.GradScaler(AcceleratorState().device.type if AcceleratorState._shared_state else "cuda", **kwargs)
