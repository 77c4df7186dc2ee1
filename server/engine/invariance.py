"""How many rows a matrix multiplication must have for a row's bits not to depend on their number.

Libraries choose another kernel, and another order of summation, for one row than for many. Padding the
rows of every step to a multiple that avoids the odd kernels gives a request the same bits alone and in a
batch. Which multiple that is differs between machines, so it is measured on the model's own layers.
"""

from __future__ import annotations

import logging

import torch
from torch.nn import functional

from bigmodel.server.engine.host_linear import Linear

logger = logging.getLogger(__name__)

CANDIDATES = (1, 2, 4, 8, 16, 32)
_MOST_ROWS = 96


def probe_row_multiple(model: torch.nn.Module, device: torch.device, host_linear: Linear = functional.linear) -> int:
    """The smallest candidate that makes rows of the model's linear layers independent of their number on ``device``.

    ``host_linear`` is what multiplies by float32 weights on the host.

    One layer of each distinct shape and dtype is tried, vocabulary-sized ones excepted (they are large and
    show nothing new). 1, and a warning, when no candidate does.
    """
    layers = _distinct_linears(model)
    for multiple in CANDIDATES:
        if all(_invariant(layer.weight.to(device), multiple, host_linear) for layer in layers):
            return multiple
    logger.warning(
        "on this machine no row padding up to %d makes matrix multiplications independent of the batch; "
        "a request may get other tokens in a batch than alone where two are almost equally likely",
        CANDIDATES[-1],
    )
    return 1


def _distinct_linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    found: dict[tuple[object, ...], torch.nn.Linear] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features != vocabulary:
            weight = module.weight
            found.setdefault((weight.shape, weight.dtype, module.bias is None), module)
    return list(found.values())


@torch.inference_mode()
def _invariant(weight: torch.Tensor, multiple: int, host_linear: Linear) -> bool:
    on_host = weight.device.type == "cpu" and weight.dtype == torch.float32
    linear = host_linear if on_host else functional.linear
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_MOST_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    full = linear(rows, weight)
    return all(
        torch.equal(linear(rows[:count], weight), full[:count]) for count in range(multiple, _MOST_ROWS, multiple)
    )
