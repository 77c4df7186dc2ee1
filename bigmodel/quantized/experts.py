"""Experts of a mixture that are held as a checkpoint stores them, and restored one by one where they are computed with.

A model of transformers has the experts of a layer as tensors whose first dimension is the expert. Here these are the
stored tensors, each of them stacked by expert: ``gate_up_proj_packed`` and ``gate_up_proj_scale`` instead of
``gate_up_proj``. Where a checkpoint stores an expert's matrix in parts, such as ``gate_proj`` and ``up_proj``, the
tensors of the parts follow each other in the second dimension.

The class's own ("eager") forward indexes one expert after another, and gets each restored as it does. Functions that
take all experts in one tensor ("grouped_mm", "batched_mm") are called once for each expert that is used, and their
results are weighted and added up as they do it themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from .formats.format import WeightFormat
from .stored import StoredModule


@dataclass(frozen=True)
class FusedWeight:
    """How the matrices of one fused tensor are stored.

    Attributes:
        name: the fused tensor's name in its module.
        format: the format of each part.
        parts: matrices, one above the other, that make up an expert's.
        shape: shape (out, in) of a part.
        transposed: whether the module computes with (in, out).
        interleaved: rows of the parts follow each other in turns, instead of one part above the other.
        names: name of the parameter that holds each stored tensor, by leaf.
    """

    name: str
    format: WeightFormat
    parts: int
    shape: tuple[int, int]
    transposed: bool
    names: Mapping[str, str]
    interleaved: bool = False

    def restore(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix of one expert, given its stored tensors by leaf."""
        rows, columns = self.shape
        whole = (self.parts * rows, columns)
        device = next(iter(tensors.values())).device
        out = torch.empty(whole[::-1] if self.transposed else whole, dtype=dtype, device=device)
        matrix = out.transpose(0, 1) if self.transposed else out
        for part in range(self.parts):
            own = {leaf: tensor.chunk(self.parts)[part] for leaf, tensor in tensors.items()}
            own_rows = slice(part, None, self.parts) if self.interleaved else slice(part * rows, (part + 1) * rows)
            self.format.restore_into(matrix[own_rows], own)
        return out


class QuantizedExperts(StoredModule):
    """The part of a class of quantised experts that `quantized_class` adds to transformers' own class.

    Attributes:
        fused: how each fused tensor is stored.
    """

    fused: tuple[FusedWeight, ...]
    num_experts: int
    config: Any

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = inspect.signature(_plain_class(self).forward).bind(self, *args, **kwargs).args[1:]
        eager = getattr(self.config, "_experts_implementation", None) in (None, "eager")
        compute: Callable[..., torch.Tensor] = partial(_indexing if eager else _one_by_one, self)
        if eager and _wants_gradients(*arguments):
            return _recomputed(compute, *arguments)
        return compute(*arguments)

    def restored(self, expert: int | torch.Tensor, fused: FusedWeight) -> torch.Tensor:
        """Return the matrix of one expert."""
        stored = {leaf: getattr(self, name)[expert] for leaf, name in fused.names.items()}
        return fused.restore(stored, self.compute_dtype)


class RestoredTensor:
    """Replaces a fused tensor: indexing it with an expert's number restores that expert's matrix."""

    def __init__(self, module: QuantizedExperts, fused: FusedWeight) -> None:
        self._module, self._fused = module, fused
        self.dtype = module.compute_dtype

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        return self._module.restored(expert, self._fused)


def _indexing(module: QuantizedExperts, *arguments: Any) -> torch.Tensor:
    """Compute with the class's own forward, which indexes expert after expert."""
    lazy = {fused.name: RestoredTensor(module, fused) for fused in module.fused}
    output: torch.Tensor = _as_plain(module, lazy)(*arguments)
    return output


def _one_by_one(
    module: QuantizedExperts, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Compute each expert that is used on its rows, then weight and add up as transformers' functions do."""
    per_token = index.shape[-1]
    products: torch.Tensor | None = None
    for expert, rows in _rows_by_expert(index, module.num_experts):
        tokens = hidden[rows // per_token]
        run = _recomputed if _wants_gradients(tokens) else _called
        product = run(partial(_product, module, expert), tokens, *rest)
        if products is None:
            products = product.new_zeros(index.numel(), product.shape[-1])
        products.index_copy_(0, rows, product)
        del tokens, product
    if products is None:
        return torch.zeros_like(hidden)
    weighted = products * weights.reshape(-1, 1)
    return weighted.view(-1, per_token, products.shape[-1]).sum(dim=1).to(hidden.dtype)


def _rows_by_expert(index: torch.Tensor, count: int) -> Iterable[tuple[int, torch.Tensor]]:
    """Yield the experts that are used, each with the numbers of its (token, choice) pairs.

    A dry run, which knows no values, gets the routing that takes most memory: two experts that every token uses.
    """
    if isinstance(index, FakeTensor):
        for expert in range(min(2, count, index.shape[-1])):
            yield expert, torch.arange(index.shape[0], device=index.device) * index.shape[-1] + expert
        return
    flat = index.reshape(-1).cpu()
    for expert in torch.unique(flat).tolist():
        if 0 <= expert < count:
            yield expert, (flat == expert).nonzero().squeeze(1).to(index.device)


def _product(module: QuantizedExperts, expert: int, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the unweighted output of one expert for some tokens."""
    tensors: dict[str, Any] = {fused.name: module.restored(expert, fused).unsqueeze(0) for fused in module.fused}
    stored = {name for fused in module.fused for name in fused.names.values()}
    beside = (name for name, tensor in module._parameters.items() if tensor is not None and name not in stored)
    tensors |= {name: getattr(module, name)[expert].unsqueeze(0) for name in beside}
    index = torch.zeros(tokens.shape[0], 1, dtype=torch.int64, device=tokens.device)
    output: torch.Tensor = _as_plain(module, {**tensors, "num_experts": 1})(
        tokens, index, tokens.new_ones(index.shape), *rest
    )
    return output


def _wants_gradients(*arguments: Any) -> bool:
    tensors = (each for each in arguments if isinstance(each, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _called(compute: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    return compute(*arguments)


def _recomputed(compute: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Compute such that no restored matrix is kept for the backward, which computes once more."""
    output: torch.Tensor = checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False)
    return output


def _as_plain(module: QuantizedExperts, attributes: Mapping[str, Any]) -> Any:
    """Return the forward of transformers' own class, bound to a shallow copy of `module` with other attributes."""
    plain = _plain_class(module)
    other = object.__new__(plain)
    other.__dict__.update(module.__dict__)
    other.__dict__.update(attributes)
    other.__dict__.pop("forward", None)
    return plain.forward.__get__(other)


def _plain_class(module: QuantizedExperts) -> Any:
    return type(module).__bases__[1]


@cache
def quantized_class(plain: type[nn.Module]) -> type[QuantizedExperts]:
    """Return the class of quantised experts for transformers' class `plain`."""
    return type(f"Quantized{plain.__name__}", (QuantizedExperts, plain), {"__module__": plain.__module__})
