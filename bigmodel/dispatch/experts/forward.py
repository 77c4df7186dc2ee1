"""Forward of a mixture-of-experts layer that fetches only the experts its router chose.

The experts function that transformers is configured to use is called with a stand-in for the module: a shallow copy
with other fused tensors. The model itself is not changed, so threads do not interfere and an exception leaves no trace.

A class's own ("eager") function indexes one expert after another, ``gate_up_proj[expert]``: its stand-in has
`LazyTensor`s, which fetch experts as they are indexed. Other functions take one tensor of experts and the expert number
of each token: they get the cache's slots and slot numbers. Their results must not depend on the numbering of experts;
those of transformers' functions ("grouped_mm", "batched_mm") do not.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ...limits import GRADIENT_BYTES, MOST_GROUPS, NEARLY_ALL_EXPERTS
from ...quantized.experts import QuantizedExperts
from .cache import Chosen, ExpertCache
from .gradients import differentiable, wants_gradients
from .layer import ExpertLayer, stand_in
from .lazy_tensors import ExpertQueue, LazyTensor, split, wave_size


class ExpertForward:
    """Computes one experts module; called with the args (tuple) and kwargs (dict) of its forward."""

    def __init__(
        self, module: nn.Module, layer: ExpertLayer, cache: ExpertCache, gradient_bytes: int = GRADIENT_BYTES
    ) -> None:
        self._module = weakref.ref(module)
        self._arguments = inspect.signature(type(module).forward)
        self.layer = layer
        self.cache = cache
        self._gradient_bytes = gradient_bytes

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Compute the layer.

        Args:
            args: Hidden states (tokens, hidden size); the chosen experts and their weights, both (tokens, experts
                per token).
            kwargs: Those of them that are passed by name; names depend on the class.
        """
        module = self._module()
        assert module is not None
        _, hidden, index, weights = self._arguments.bind(module, *args, **kwargs).args
        if wants_gradients(self.layer, hidden, weights):
            return differentiable(self.compute, module, self.layer, hidden, index, weights, self._gradient_bytes)
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
            return self._compute_lazily(module, chosen, hidden, index, weights)
        if fits and self.cache.slots <= MOST_GROUPS:

            def compute(slots: list[int]) -> torch.Tensor:
                self._prefetch_next_layer(chosen)
                return self._compute(module, hidden, _renumbered(numbers, chosen, slots), weights)

            return self.cache.visit(Chosen(self.layer, chosen), compute)
        return self._compute_chunked(module, chosen, hidden, numbers, weights)

    def _compute_lazily(
        self, module: nn.Module, chosen: list[int], hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        def compute(held: list[int]) -> torch.Tensor:
            experts = ExpertQueue(self.cache, self.layer, chosen, held)
            tensors = {name: LazyTensor(experts, name, self.cache.rows[name]) for name in self.layer.names}
            if chosen and len(chosen) <= self.cache.slots:
                experts.slot(chosen[0])
                self._prefetch_next_layer(chosen)
            output: torch.Tensor = stand_in(module, **tensors)(hidden, index, weights)
            return output

        return self.cache.visit(Chosen(self.layer, ()), compute)

    def _compute_chunked(
        self, module: nn.Module, chosen: list[int], hidden: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute chunks of experts one after another, then weight and sum as transformers' experts functions do."""
        flat = numbers.reshape(-1)
        per_token = numbers.shape[-1]
        products: list[torch.Tensor] = []
        chunks = split(chosen, min(wave_size(len(chosen), self.cache.slots), MOST_GROUPS))

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
        """Call the experts function on slots of one group; without `weights`, all weights are 1."""
        if weights is None:
            weights = hidden.new_ones(index.shape)
        start = int(index.min()) // MOST_GROUPS * MOST_GROUPS if index.numel() else 0
        end = min(start + MOST_GROUPS, self.cache.slots)
        tensors = {name: rows[start:end] for name, rows in self.cache.rows.items()}
        index = (index - start).to(hidden.device)
        output: torch.Tensor = stand_in(module, num_experts=end - start, **tensors)(hidden, index, weights)
        return output

    def _prefetch_next_layer(self, chosen: list[int]) -> None:
        if len(chosen) >= NEARLY_ALL_EXPERTS * self.layer.experts:
            following = self.cache.following(self.layer)
            if following is not self.layer:
                self.cache.fetch_ahead(following, range(following.experts))


def _indexes_experts(module: nn.Module, fits: bool) -> bool:
    """Whether the experts function that `module` is configured to use must get lazy tensors to index by expert.

    "batched_mm" indexes too, to copy an expert per token. As long as all experts fit, it indexes the slots instead.
    """
    if isinstance(module, QuantizedExperts):
        return True
    implementation = getattr(module.config, "_experts_implementation", None)
    return implementation in (None, "eager") or (implementation == "batched_mm" and not fits)


def _renumbered(numbers: torch.Tensor, experts: list[int], slots: list[int]) -> torch.Tensor:
    """Return `numbers` with each expert's number replaced by that of its slot."""
    slot_of = numbers.new_zeros(max(experts, default=0) + 1)
    slot_of[experts] = numbers.new_tensor(slots)
    return slot_of[numbers]


def _by_group(experts: list[int], slots: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield experts and their slots, grouped such that the slots of one group span at most `MOST_GROUPS`."""
    for group in sorted({slot // MOST_GROUPS for slot in slots}):
        pairs = [(expert, slot) for expert, slot in zip(experts, slots) if slot // MOST_GROUPS == group]
        yield [expert for expert, _ in pairs], [slot for _, slot in pairs]
