"""Mixture of experts: a layer computes with the experts its router chose, and only those come to the device.

The experts function that transformers is configured to use, whichever it is, is called with a stand-in for the
module: the same module in all but its fused tensors. Nothing in the model is changed meanwhile, so threads do not meet
and an exception leaves nothing behind.

A class's own ("eager") function asks for one expert after another, ``gate_up_proj[expert]``: the stand-in has tensors
that can be asked just that, and brings experts in as they are asked for. Other functions want one tensor of experts and
their numbers for each token: they get the cache's slots, and the numbers of slots. Their results must not depend on
how experts are numbered; those of transformers ("grouped_mm", "batched_mm") do not.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ...limits import MOST_GROUPS, NEARLY_ALL_EXPERTS
from .cache import Chosen, ExpertCache
from .gradients import differentiable, wants_gradients
from .layer import ExpertLayer, stand_in
from .lazy_tensors import ExpertQueue, LazyTensor, fitting, split


class ExpertForward:
    """Computes one experts module, called with args and kwargs as its forward would be, as a tuple and a dict."""

    def __init__(self, module: nn.Module, layer: ExpertLayer, cache: ExpertCache) -> None:
        self._module = weakref.ref(module)
        self._arguments = inspect.signature(type(module).forward)
        self.layer = layer
        self.cache = cache

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Compute the layer.

        Args:
            args: Hidden states (tokens, hidden size); the chosen experts and their weights, both (tokens, experts
                per token); by whatever names the class gives them.
            kwargs: Those of them that are given by name.
        """
        module = self._module()
        assert module is not None
        _, hidden, index, weights = self._arguments.bind(module, *args, **kwargs).args
        if wants_gradients(self.layer, hidden, weights):
            return differentiable(self.compute, module, self.layer, hidden, index, weights)
        return self.compute(hidden, index, weights)

    def compute(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute the layer without gradients."""
        module = self._module()
        assert module is not None
        numbers = index.cpu()
        chosen = [int(expert) for expert in torch.unique(numbers)]
        self.cache.record(self.layer, chosen)
        fits = len(chosen) <= self.cache.slots
        if _indexes_experts(module, fits):
            return self._lazily(module, chosen, hidden, index, weights)
        if fits and self.cache.slots <= MOST_GROUPS:

            def compute(slots: list[int]) -> torch.Tensor:
                self._look_ahead(chosen)
                return self._compute(module, hidden, _renumbered(numbers, chosen, slots), weights)

            return self.cache.visit(Chosen(self.layer, chosen), compute)
        return self._compute_chunked(module, chosen, hidden, numbers, weights)

    def _lazily(
        self, module: nn.Module, chosen: list[int], hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:

        def compute(held: list[int]) -> torch.Tensor:
            experts = ExpertQueue(self.cache, self.layer, chosen, held)
            tensors = {name: LazyTensor(experts, name, self.cache.rows[name]) for name in self.layer.names}
            if chosen and len(chosen) <= self.cache.slots:
                experts.slot(chosen[0])
                self._look_ahead(chosen)
            output: torch.Tensor = stand_in(module, **tensors)(hidden, index, weights)
            return output

        return self.cache.visit(Chosen(self.layer, ()), compute)

    def _compute_chunked(
        self, module: nn.Module, chosen: list[int], hidden: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute some experts after another, and then weigh and add up as transformers' experts functions do."""
        flat = numbers.reshape(-1)
        per_token = numbers.shape[-1]
        products: list[torch.Tensor] = []
        chunks = split(chosen, min(fitting(len(chosen), self.cache.slots), MOST_GROUPS))

        def compute(number: int, held: list[int]) -> None:
            self.cache.fetch_ahead(self.layer, chunks[number + 1] if number + 1 < len(chunks) else [])
            for part, slots in _by_group(chunks[number], held):
                rows = torch.isin(flat, flat.new_tensor(part)).nonzero().squeeze(1)
                index = _renumbered(flat[rows], part, slots).unsqueeze(1)
                rows = rows.to(hidden.device)
                product = self._compute(module, hidden[rows // per_token], index, None)
                if not products:
                    products.append(product.new_zeros(flat.numel(), product.shape[-1]))
                products[0].index_copy_(0, rows, product)

        for number, experts in enumerate(chunks):
            self.cache.visit(Chosen(self.layer, experts, soon=chosen), partial(compute, number))
        (product,) = products  # there is at least one token
        weighted = product * weights.reshape(-1, 1)
        return weighted.view(-1, per_token, product.shape[-1]).sum(dim=1).to(hidden.dtype)

    def _compute(
        self, module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Call the experts function on slots of one group; without weights, each product counts once."""
        if weights is None:
            weights = hidden.new_ones(index.shape)
        start = int(index.min()) // MOST_GROUPS * MOST_GROUPS if index.numel() else 0
        end = min(start + MOST_GROUPS, self.cache.slots)
        tensors = {name: rows[start:end] for name, rows in self.cache.rows.items()}
        index = (index - start).to(hidden.device)
        output: torch.Tensor = stand_in(module, num_experts=end - start, **tensors)(hidden, index, weights)
        return output

    def _look_ahead(self, chosen: list[int]) -> None:
        if len(chosen) >= NEARLY_ALL_EXPERTS * self.layer.experts:
            following = self.cache.following(self.layer)
            if following is not self.layer:
                self.cache.fetch_ahead(following, range(following.experts))


def _indexes_experts(module: nn.Module, fits: bool) -> bool:
    """Whether the experts function that `module` is configured to use indexes the fused tensors by expert.

    "batched_mm" does as well, to make a copy for each token. It is given slots to index as long as all experts fit.
    """
    implementation = getattr(module.config, "_experts_implementation", None)
    return implementation in (None, "eager") or (implementation == "batched_mm" and not fits)


def _renumbered(numbers: torch.Tensor, experts: list[int], slots: list[int]) -> torch.Tensor:
    """Return `numbers` with the number of each of `experts` replaced by that of its slot."""
    slot_of = numbers.new_zeros(max(experts, default=0) + 1)
    slot_of[experts] = numbers.new_tensor(slots)
    return slot_of[numbers]


def _by_group(experts: list[int], slots: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield experts and their slots such that all slots lie among the same `MOST_GROUPS`."""
    for group in sorted({slot // MOST_GROUPS for slot in slots}):
        pairs = [(expert, slot) for expert, slot in zip(experts, slots) if slot // MOST_GROUPS == group]
        yield [expert for expert, _ in pairs], [slot for _, slot in pairs]
