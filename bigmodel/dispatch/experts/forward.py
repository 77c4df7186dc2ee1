"""Forward of a mixture-of-experts layer that fetches only the experts its router chose.

The experts function that transformers is configured to use is called with a stand-in for the module: a shallow copy
with other fused tensors. The model itself is not changed, so threads do not interfere and an exception leaves no trace.

A class's own ("eager") function indexes one expert after another, ``gate_up_proj[expert]``: its stand-in has
`LazyTensor`s, which fetch experts as they are indexed. Other functions take one tensor of experts and the expert number
of each token: they get the cache's slots and slot numbers. Their results must not depend on the numbering of experts;
those of transformers' functions ("grouped_mm", "batched_mm") do not.

Where the plan has an `ExpertSplit`, calls of few tokens have the host compute some of the missing experts where they
lie, while the link fetches the others.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ...devices import HOST
from ...limits import GRADIENT_BYTES, MOST_GROUPS, NEARLY_ALL_EXPERTS
from ...plan.result.expert_split import ExpertSplit
from ...quantized.experts import QuantizedExperts
from .cache import Chosen, ExpertCache
from .gradients import differentiable, wants_gradients
from .layer import ExpertLayer, stand_in
from .lazy_tensors import ExpertQueue, LazyTensor, split, wave_size
from .products import BATCHED, Products


class ExpertForward:
    """Computes one experts module; called with the args (tuple) and kwargs (dict) of its forward."""

    def __init__(
        self,
        module: nn.Module,
        layer: ExpertLayer,
        cache: ExpertCache,
        gradient_bytes: int = GRADIENT_BYTES,
        split: ExpertSplit | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self._arguments = inspect.signature(type(module).forward)
        self.layer = layer
        self.cache = cache
        self._gradient_bytes = gradient_bytes
        self._split = split

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
        if self._split is not None and len(hidden) < self._split.below and self.layer.on_host:
            fetched, on_host = self.cache.divide(self.layer, chosen, self._split)
            if on_host:
                return self._compute_divided(module, chosen, fetched, on_host, hidden, numbers, weights)
        if fits and self.cache.slots <= MOST_GROUPS:

            def compute(slots: list[int]) -> torch.Tensor:
                index = _renumbered(numbers, chosen, slots)
                start = _start_of_group(index)
                index = (index - start).to(hidden.device)  # before fetches are queued, which it would wait for
                self._prefetch_next_layer(chosen)
                return self._compute(module, hidden, index, start, weights)

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
        products = Products(hidden, numbers, _implementation(module) == BATCHED)
        self._add_products(module, self._chunks(chosen, len(chosen)), chosen, products)
        return products.weighted(weights)

    def _compute_divided(
        self,
        module: nn.Module,
        chosen: list[int],
        fetched: list[int],
        on_host: list[int],
        hidden: torch.Tensor,
        numbers: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the experts in slots, then those of `on_host` where they lie while `fetched` arrive, then these."""
        here = hidden.to(HOST)  # before anything is queued on the device, which the copy would wait for
        products = Products(hidden, numbers, _implementation(module) == BATCHED)
        missing = {*fetched, *on_host}
        present = [expert for expert in chosen if expert not in missing]
        size = len(present) + len(fetched)
        arriving = self._chunks(fetched, size)
        if present:
            self._add_products(module, self._chunks(present, size), chosen, products, arriving)
        elif arriving:
            self.cache.fetch_ahead(self.layer, arriving[0])
        products.add_from_host(module, self.layer, on_host, here)
        self._add_products(module, arriving, chosen, products)
        return products.weighted(weights)

    def _chunks(self, experts: list[int], count: int) -> list[list[int]]:
        """Return `experts` in chunks that the cache can hold while it fetches the next, of `count` in one call."""
        return split(experts, min(wave_size(count, self.cache.slots), MOST_GROUPS))

    def _add_products(
        self,
        module: nn.Module,
        chunks: list[list[int]],
        soon: list[int],
        products: Products,
        following: list[list[int]] | None = None,
    ) -> None:
        """Compute chunks of experts one after another; fetch the first of `following` chunks during the last."""
        coming = [*chunks[1:], *(following or [])]

        def compute(number: int, held: list[int]) -> None:
            device = products.hidden.device
            groups = []
            for part, slots in _by_group(chunks[number], held):
                rows = products.at_least_two(products.rows_of(part))
                index = _renumbered(products.numbers[rows], part, slots).unsqueeze(1)
                start = _start_of_group(index)
                groups.append((rows.to(device), (index - start).to(device), start))
            # The transfers above would wait for fetches that are queued before them.
            self.cache.fetch_ahead(self.layer, coming[number] if number < len(coming) else [])
            for rows, index, start in groups:
                tokens = products.hidden[rows // products.per_token]
                products.add(rows, self._compute(module, tokens, index, start, tokens.new_ones(index.shape)))

        for number, experts in enumerate(chunks):
            self.cache.visit(Chosen(self.layer, experts, soon=soon), partial(compute, number))

    def _compute(
        self, module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, start: int, weights: torch.Tensor
    ) -> torch.Tensor:
        """Call the experts function on the slots of one group, from slot `start` on; `index` counts from there."""
        end = min(start + MOST_GROUPS, self.cache.slots)
        tensors = {name: rows[start:end] for name, rows in self.cache.rows.items()}
        output: torch.Tensor = stand_in(module, num_experts=end - start, **tensors)(hidden, index, weights)
        return output

    def _prefetch_next_layer(self, chosen: list[int]) -> None:
        if len(chosen) >= NEARLY_ALL_EXPERTS * self.layer.experts:
            following = self.cache.following(self.layer)
            if following is not self.layer:
                self.cache.fetch_ahead(following, range(following.experts))


def _indexes_experts(module: nn.Module, fits: bool) -> bool:
    """Whether the experts function that `module` is configured to use must get lazy tensors to index by expert.

    `BATCHED` indexes too, to copy an expert per token. As long as all experts fit, it indexes the slots instead.
    """
    if isinstance(module, QuantizedExperts):
        return True
    implementation = _implementation(module)
    return implementation in (None, "eager") or (implementation == BATCHED and not fits)


def _implementation(module: Any) -> str | None:
    implementation: str | None = getattr(module.config, "_experts_implementation", None)
    return implementation


def _renumbered(numbers: torch.Tensor, experts: list[int], slots: list[int]) -> torch.Tensor:
    """Return `numbers` with each expert's number replaced by that of its slot."""
    slot_of = numbers.new_zeros(max(experts, default=0) + 1)
    slot_of[experts] = numbers.new_tensor(slots)
    return slot_of[numbers]


def _start_of_group(slots: torch.Tensor) -> int:
    """Return the first slot of the group in which all of `slots` are."""
    return int(slots.min()) // MOST_GROUPS * MOST_GROUPS if slots.numel() else 0


def _by_group(experts: list[int], slots: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield experts and their slots, grouped such that the slots of one group span at most `MOST_GROUPS`."""
    for group in sorted({slot // MOST_GROUPS for slot in slots}):
        pairs = [(expert, slot) for expert, slot in zip(experts, slots) if slot // MOST_GROUPS == group]
        yield [expert for expert, _ in pairs], [slot for _, slot in pairs]
