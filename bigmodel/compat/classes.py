"""Small classes and functions that other libraries import from ``accelerate.utils``."""

from __future__ import annotations

import logging
import platform
import re
import socket
from typing import Any

import torch
from torch import nn

from ..errors import TrainError
from ..train.collectives import gather_object, reduce
from ..train.handlers import AORecipeKwargs
from ..train.state.partial import PartialState
from ..train.types import DistributedType


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor is not padded across processes."""


class FP8RecipeKwargs:
    """Makes the handler of an 8-bit backend, as ``FP8RecipeKwargs(backend="AO")``: an `AORecipeKwargs`.

    Raises:
        TrainError: The backend is TransformerEngine or MS-AMP.
    """

    def __new__(cls, backend: str = "AO", **kwargs: Any) -> Any:
        if backend.upper() != "AO":
            raise TrainError(f"the backend {backend!r} of 8-bit training is not supported; use 'AO' (torchao)")
        return AORecipeKwargs(**kwargs)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return on every rank the tensor that one rank gives; the others give None."""
    state = PartialState()
    given = gather_object([None if tensor is None else (tensor.shape, tensor.dtype)])
    shape, dtype = next(each for each in given if each is not None)
    own = torch.zeros(shape, dtype=dtype, device=state.device) if tensor is None else tensor
    copied: torch.Tensor = reduce(own, reduction="sum")
    return copied


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class called `name` of a module in `module`, of the first one found; None if there is none."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the `DeepSpeedPlugin` in use.

    Raises:
        ValueError: DeepSpeed is not in use.
    """
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError("this run does not use DeepSpeed: give the Accelerator a deepspeed_plugin")
    return state.deepspeed_plugin


def check_cuda_fp8_capability() -> bool:
    """Whether the GPU computes with 8-bit floating-point numbers."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def convert_dict_to_env_variables(current_env: dict[str, Any]) -> list[str]:
    """Return ``KEY=VALUE`` lines of those variables whose value can be one, for a file that a shell reads."""
    unsafe = set(";\n<>&| ")
    return [
        f"{key}={value}\n"
        for key, value in current_env.items()
        if all(unsafe.isdisjoint(str(text)) and text != "" for text in (key, value))
    ]


def get_free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_os_kernel() -> None:
    """Warn of a Linux kernel on which processes may hang: one before 5.5."""
    found = re.match(r"(\d+)\.(\d+)", platform.release()) if platform.system() == "Linux" else None
    if found and tuple(map(int, found.groups())) < (5, 5):
        logging.getLogger(__name__).warning(
            "the kernel of this machine is %s; before 5.5 processes may hang: use a newer one", platform.release()
        )


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return over how many ranks the layers of a model of transformers are split; None if they are not."""
    size = getattr(model, "tp_size", None)
    return size if isinstance(size, int) else None
