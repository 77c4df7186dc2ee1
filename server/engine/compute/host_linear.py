"""Layers whose bits do not depend on the batch: the host's float32 library, the padding of rows, and their layout.

**Library.** PyTorch computes float32 products with MKL, which uses its AVX-512 kernels on Intel processors only; others
get registers of half the width. oneDNN, also part of PyTorch, uses what the processor has. On a Zen 5 it is more than
twice as fast at the sizes of a step (`bigmodel bench serve-linear` prints both). It reads weights in place: nothing is
converted or copied. The two sum in different orders, so their last bits differ; an engine uses one of them throughout.

**Padding.** Libraries choose another kernel, and another order of summation, for one row than for many. Padding the
rows of every step to a multiple that avoids those kernels gives a request the same bits alone and in a batch. The
multiple differs between machines, so it is measured on the model's own layers.

**Layout.** PyTorch has another library compute GELU of contiguous float32 tensors on the host. A part of wider rows is
contiguous with one row and not with several, so these layers are given copies that are.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from bigmodel.errors import ServeError

HostLinear = Literal["auto", "torch", "onednn"]
Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ROW_COUNTS = (2, 4, 8, 12, 16, 24, 32, 48, *range(64, 513, 32))
"""Row counts that oneDNN computes; other counts are padded to the next one."""

_PROCESSOR = Path("/proc/cpuinfo")


def choose_host_linear(wanted: HostLinear) -> HostLinear:
    """``wanted``, or for "auto" the library that is faster on this processor: "torch" or "onednn".

    Decided by the processor's vendor and instruction set, not by timing: a restarted server must give the same bits.
    Raises ServeError when oneDNN is wanted and this PyTorch has none.
    """
    if wanted == "torch":
        return wanted
    if wanted == "onednn":
        if not torch.backends.mkldnn.is_available():
            raise ServeError("this PyTorch was built without oneDNN; use host_linear='torch'")
        return wanted
    held_back = torch.backends.mkl.is_available() and _vendor() not in (None, "GenuineIntel")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "onednn" if held_back and wide and torch.backends.mkldnn.is_available() else "torch"


def linear_of(chosen: HostLinear) -> Linear:
    """The function ``(rows, weight) -> rows @ weight.T`` of the chosen library."""
    return functional.linear if chosen == "torch" else onednn_linear


class OneDnnLinear(TorchFunctionMode):
    """Route this thread's `functional.linear` of float32 host tensors to oneDNN inside the context.

    Works on dispatched models as on any other: no module and no weight is changed.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and _takes(*args, **(kwargs or {})):
            return onednn_linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def onednn_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`functional.linear` of float32 tensors on the host, by oneDNN. Not differentiable.

    oneDNN compiles and keeps a kernel of about 1 MB per row count. Rows are therefore computed in chunks of the sizes
    in
    :data:`ROW_COUNTS`, padded with zeros. 1 is not among them, because its kernel sums in another order: so a row has
    the same bits for any number of rows.
    """
    rows = input.reshape(-1, input.shape[-1])
    if len(rows) <= ROW_COUNTS[-1]:
        out = _padded(rows, weight, bias)
    else:
        out = torch.cat([_padded(chunk, weight, bias) for chunk in rows.split(ROW_COUNTS[-1])])
    return out.reshape(*input.shape[:-1], -1)


def _padded(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of at most ``ROW_COUNTS[-1]`` rows."""
    missing = ROW_COUNTS[bisect_left(ROW_COUNTS, len(rows))] - len(rows)
    filled = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(filled, weight, bias, "none", [], "")
    return result[: len(rows)]


def _takes(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    # Tensors of other devices, and wrapper tensors, are left to PyTorch.
    return all(_is_plain(tensor) for tensor in (input, weight, bias) if tensor is not None) and input.numel() > 0


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def _vendor() -> str | None:
    """Vendor of an x86 processor; None where the system does not report it."""
    if not _PROCESSOR.exists():
        return None
    match = re.search(r"^vendor_id\s*:\s*(\S+)$", _PROCESSOR.read_text(), re.MULTILINE)
    return match.group(1) if match else None


logger = logging.getLogger(__name__)

CANDIDATES = (1, 2, 4, 8, 16, 32)
_MOST_ROWS = 96


def probe_row_multiple(model: torch.nn.Module, device: torch.device, host_linear: Linear = functional.linear) -> int:
    """The smallest multiple of rows at which the bits of a row of the model's linear layers do not depend on the
    others.

    ``host_linear`` computes products with float32 weights on the host. One layer of each distinct shape and dtype is
    measured, except vocabulary-sized ones, which are large and add nothing. Returns 1, with a warning, when no
    candidate works.
    """
    products = _distinct_products(model, device, host_linear)
    for multiple in CANDIDATES:
        if all(_invariant(weight.to(device), multiple, linear) for weight, linear in products):
            return multiple
    logger.warning(
        "on this machine no row padding up to %d makes matrix multiplications independent of the batch; "
        "a request may get other tokens in a batch than alone where two are almost equally likely",
        CANDIDATES[-1],
    )
    return 1


def _distinct_products(
    model: torch.nn.Module, device: torch.device, host_linear: Linear
) -> list[tuple[torch.Tensor, Linear]]:
    """Weights [out, in] of layers that differ, each with what multiplies rows with it."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    found: dict[tuple[object, ...], tuple[torch.Tensor, Linear]] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features != vocabulary:
            weight = module.weight
            linear = host_linear if device.type == "cpu" and weight.dtype == torch.float32 else functional.linear
        elif isinstance(module, Conv1D):  # of GPT-2 and its like: keeps its weight transposed, and calls `addmm`
            weight, linear = module.weight.t(), _by_addmm
        else:
            continue
        found.setdefault((weight.shape, weight.dtype, module.bias is None, linear), (weight, linear))
    return list(found.values())


def _by_addmm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.addmm(rows.new_zeros(len(weight)), rows, weight.t())


@torch.inference_mode()
def _invariant(weight: torch.Tensor, multiple: int, linear: Linear) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_MOST_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    full = linear(rows, weight)
    return all(
        torch.equal(linear(rows[:count], weight), full[:count]) for count in range(multiple, _MOST_ROWS, multiple)
    )


_GELU = ("GELU", "GELUActivation")
"""Classes of layers, PyTorch's and transformers', that compute GELU by the error function."""


def give_contiguous(model: torch.nn.Module) -> None:
    """Have layers that compute GELU make their input contiguous first, until :func:`give_as_it_is` is called."""
    for module in model.modules():
        if type(module).__name__ in _GELU and _contiguous not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_contiguous)


def give_as_it_is(model: torch.nn.Module) -> None:
    """Undo :func:`give_contiguous`."""
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is _contiguous:
                del module._forward_pre_hooks[number]


def _contiguous(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (inputs[0].contiguous(),)
