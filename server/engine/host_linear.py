"""Which library multiplies by float32 weights on the host while the engine computes a step.

PyTorch hands float32 matrices to MKL, which keeps its AVX-512 kernels for processors of Intel's: on others it
computes with registers of half the width. oneDNN, which PyTorch carries too and hands bfloat16 to, asks only what
the processor can do. On a Zen 5 it is more than twice as fast at the sizes of a step (`bigmodel bench
serve-linear` prints both). It reads the weights where they lie, so nothing is converted and nothing is kept twice.

The two sum in another order, so the last bits differ between them; within an engine one of them does everything.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bigmodel.errors import ServeError

HostLinear = Literal["auto", "torch", "onednn"]
Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

BLOCKS = (2, 4, 8, 12, 16, 24, 32, 48, *range(64, 513, 32))
"""Numbers of rows that oneDNN is given."""

_PROCESSOR = Path("/proc/cpuinfo")


def choose_host_linear(wanted: HostLinear) -> HostLinear:
    """``wanted``, or for "auto" what this processor is faster with: "torch" or "onednn".

    Decided from what the processor is, not by a stopwatch: a server must give the same bits when it is started
    again. Raises ServeError when oneDNN is wanted and this PyTorch has none.
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
    """The function ``(rows, weight) -> rows @ weight.T`` that ``chosen`` stands for."""
    return functional.linear if chosen == "torch" else onednn_linear


def computing_with(chosen: HostLinear) -> AbstractContextManager[object]:
    """Within it, this thread's `functional.linear` is the one that ``chosen`` stands for."""
    return nullcontext() if chosen == "torch" else OneDnnLinear()


class OneDnnLinear(TorchFunctionMode):
    """Within it, `functional.linear` of float32 tensors on the host goes to oneDNN, in this thread only.

    No module and no weight is touched, so it is all the same to it how a model was dispatched.
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

    oneDNN writes a program for each number of rows and keeps it, a megabyte each. Rows are therefore computed in blocks
    of a few sizes, filled up with zeros. None of them is 1, whose program sums in an order of its own: so a row has the
    same bits whatever the number of rows.
    """
    rows = input.reshape(-1, input.shape[-1])
    if len(rows) <= BLOCKS[-1]:
        out = _block(rows, weight, bias)
    else:
        out = torch.cat([_block(block, weight, bias) for block in rows.split(BLOCKS[-1])])
    return out.reshape(*input.shape[:-1], -1)


def _block(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of no more rows than the largest block has."""
    missing = BLOCKS[bisect_left(BLOCKS, len(rows))] - len(rows)
    filled = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(filled, weight, bias, "none", [], "")
    return result[: len(rows)]


def _takes(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    # Tensors of other devices, and those that hold another tensor inside, are for PyTorch to dispatch.
    return all(_is_plain(tensor) for tensor in (input, weight, bias) if tensor is not None) and input.numel() > 0


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def _vendor() -> str | None:
    """Who made an x86 processor, as it says itself; None where the system does not tell."""
    if not _PROCESSOR.exists():
        return None
    match = re.search(r"^vendor_id\s*:\s*(\S+)$", _PROCESSOR.read_text(), re.MULTILINE)
    return match.group(1) if match else None
