"""Loaders of models for benchmarks: bigmodel's, the peers', and the plain model in memory.

All take the folder of a checkpoint and return a model in eval mode. Device maps have one entry per layer, as those of
`infer_auto_device_map`, and are the same for all loaders.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

DeviceMap: TypeAlias = "dict[str, int | str]"


def quiet() -> None:
    """Let transformers and accelerate load without progress bars and advice."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def without_stderr() -> contextlib.AbstractContextManager[object]:
    """Return a context that discards stderr, where accelerate shows a progress bar that cannot be disabled."""
    return contextlib.redirect_stderr(io.StringIO())


def warm_up(accelerate: bool = False, device: str = "cpu") -> None:
    """Import the modules that loading needs and run a small model once, so that imports are not timed.

    On a `device` of CUDA its context and libraries, which take a gigabyte of the host, are loaded too.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    import bigmodel.dispatch.pretrained  # noqa: F401 (a facade imports it when it is first used)

    from .checkpoints import SPECS

    quiet()
    if accelerate:
        from accelerate.utils import set_module_tensor_to_device

        set_module_tensor_to_device(nn.Linear(1, 1), "weight", "cpu", value=torch.ones(1, 1))
    place = device if device.startswith("cuda") else "cpu"
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SPECS["tiny"].config)).eval().to(place)
    model.generate(torch.ones(1, 2, dtype=torch.long, device=place), max_new_tokens=2, do_sample=False, pad_token_id=0)
    if place != "cpu":
        del model
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def layer_map(folder: Path, layers: int | str, rest: int | str) -> DeviceMap:
    """Return the map that puts every layer on `layers` and all other modules on `rest`."""
    found: DeviceMap = {}
    for name, module in skeleton(folder).named_children():
        for child, inner in module.named_children():
            if child == "layers":
                found.update({f"{name}.layers.{index}": layers for index in range(len(list(inner.children())))})
            else:
                found[f"{name}.{child}"] = rest
        if not list(module.children()):
            found[name] = rest
    return found


def skeleton(folder: Path) -> nn.Module:
    """Return the model of a checkpoint on meta."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model


def ours(folder: Path, device_map: str | Mapping[str, int | str], **options: Any) -> nn.Module:
    """Load and dispatch with bigmodel."""
    from bigmodel.dispatch import from_pretrained

    model: nn.Module = from_pretrained(folder, device_map=device_map, **options)
    return model


def mapped(folder: Path) -> nn.Module:
    """Load with transformers, whose weights on the CPU are views of the mapped file."""
    from transformers import AutoModelForCausalLM

    quiet()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    return model


def resident(folder: Path, device: str = "cpu", placed: bool = False) -> nn.Module:
    """Load with transformers and copy every weight to anonymous memory.

    Args:
        folder: The checkpoint.
        device: Device of the copies.
        placed: On the host, keep each weight's offset within its page as in the file.
    """
    model = mapped(folder)
    seen: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        if parameter.data_ptr() not in seen:
            copied = copy_placed_alike(parameter.data) if placed else parameter.data.to(device, copy=True)
            seen[parameter.data_ptr()] = copied
        parameter.data = seen[parameter.data_ptr()]
    return model.to(device)


def copy_placed_alike(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in anonymous memory at the same offset within a page as `tensor`."""
    import mmap

    import torch

    memory = torch.empty(tensor.nbytes + mmap.PAGESIZE, dtype=torch.uint8)
    begin = (tensor.data_ptr() - memory.data_ptr()) % mmap.PAGESIZE
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def accelerate_dispatched(folder: Path, device_map: DeviceMap, offload_folder: Path) -> nn.Module:
    """Load with accelerate's load_checkpoint_and_dispatch, which writes weights mapped to disk to `offload_folder`."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet()
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with without_stderr():
        dispatched: nn.Module = load_checkpoint_and_dispatch(
            model, folder, device_map=device_map, offload_folder=offload_folder
        )
    return dispatched.eval()


def accelerate_indexed(folder: Path, device_map: DeviceMap, offload_folder: Path) -> nn.Module:
    """Load with transformers by a device map: accelerate's hooks then read from the checkpoint's own shards."""
    from transformers import AutoModelForCausalLM

    quiet()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", device_map=device_map, offload_folder=offload_folder
    )
    return model.eval()
