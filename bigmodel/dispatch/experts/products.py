"""The products of a call's tokens with their experts, computed in parts: chunks in slots, and some on the host.

A row, one token with one expert, has the same bits in whichever part it is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..weights.outside_use import host_value
from .layer import ExpertLayer, stand_in

BATCHED = "batched_mm"
"""The experts function that copies an expert for each row, and computes all rows as one batch of products."""


class Products:
    """The products of a call's tokens with the experts chosen for them, a row for each pair.

    Args:
        hidden: (tokens, hidden size), on the device.
        numbers: (tokens, experts per token), the chosen experts, on the host.
        in_batches: They are computed by `BATCHED`.
    """

    def __init__(self, hidden: torch.Tensor, numbers: torch.Tensor, in_batches: bool) -> None:
        self.hidden = hidden
        self.in_batches = in_batches
        self.numbers = numbers.reshape(-1)
        self.per_token = numbers.shape[-1]
        self._rows: torch.Tensor | None = None

    def rows_of(self, experts: list[int]) -> torch.Tensor:
        """Return the rows of some experts: int64, on the host."""
        return torch.isin(self.numbers, self.numbers.new_tensor(experts)).nonzero().squeeze(1)

    def at_least_two(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a single row twice where rows are computed in batches: PyTorch computes a batch of one by another
        kernel, whose last bits differ."""
        return rows.repeat(2) if self.in_batches and len(rows) == 1 and len(self.numbers) > 1 else rows

    def add(self, rows: torch.Tensor, products: torch.Tensor) -> None:
        """Add the products of these rows."""
        device = self.hidden.device
        if self._rows is None:
            self._rows = products.new_zeros(self.numbers.numel(), products.shape[-1], device=device)
        self._rows.index_copy_(0, rows.to(device), products.to(device))

    def add_from_host(self, module: nn.Module, layer: ExpertLayer, experts: list[int], here: torch.Tensor) -> None:
        """Compute the rows of some experts on the host, where they lie, and add their products.

        Args:
            module: The experts module.
            layer: Its experts.
            experts: Those that are computed.
            here: `hidden`, on the host.
        """
        values = {name: host_value(each.value) for name, each in zip(layer.names, layer.fused.tensors)}
        rows = self.rows_of(experts)
        rows = rows[self.numbers[rows].argsort()]
        for part in rows.split(2) if self.in_batches else [rows]:
            part = self.at_least_two(part)
            index = self.numbers[part]
            tensors: dict[str, Any] = values
            if self.in_batches:
                tensors = {name: _ViewedExperts(value, index.tolist()) for name, value in values.items()}
            tokens = here[part // self.per_token]
            self.add(part, stand_in(module, **tensors)(tokens, index.unsqueeze(1), tokens.new_ones(len(part), 1)))

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum over each token's experts, weighted as transformers' experts functions do it."""
        assert self._rows is not None  # there is at least one token
        weighted = self._rows * weights.reshape(-1, 1)
        return weighted.view(-1, self.per_token, self._rows.shape[-1]).sum(dim=1).to(self.hidden.dtype)


class _ViewedExperts:
    """Replaces a fused tensor for a call of one or two rows: indexing it returns views of their experts, not copies.

    Args:
        value: The fused tensor.
        experts: That of each row, in ascending order.
    """

    def __init__(self, value: torch.Tensor, experts: list[int]) -> None:
        self._value = value
        self._experts = experts
        self.device = value.device
        self.dtype = value.dtype

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        first, last = self._experts[0], self._experts[-1]
        if first == last:
            return self._value[first : first + 1].expand(len(self._experts), *self._value.shape[1:])
        return self._value[first : last + 1 : last - first]
