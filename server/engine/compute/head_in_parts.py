"""Logits of many rows without memory for all of them on an accelerator: computed part by part, kept on the host.

Plans count the logits of the rows that tokens are sampled from. Log-probabilities of a prompt need those of each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bigmodel.devices import HOST
from bigmodel.server.engine.compute.hidden import output_layer


@contextmanager
def head_in_parts(model: torch.nn.Module, rows: int) -> Iterator[None]:
    """Within this context, the output layer computes at most so many rows at once, and gives its logits on the host.

    What a model does with its logits afterwards (scales, caps) is done on the host, too. A model without an output
    layer in this process computes as ever.

    Args:
        model: The model.
        rows: At least 1.
    """
    layer: Any = output_layer(model)
    if layer is None:
        yield
        return
    own, forward = vars(layer).get("forward"), layer.forward

    def in_parts(states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        parts = states.split(rows, dim=-2)
        return torch.cat([forward(part, *args, **kwargs).to(HOST) for part in parts], dim=-2)

    layer.forward = in_parts
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own
