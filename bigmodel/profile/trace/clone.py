"""A copy of a model whose tensors are fake: it runs, allocates nothing, and the model itself is left alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..model.units import UnitProfile
from .layer_repeat import Shortening, kind_of, shorten


def find_shortenings(model: nn.Module, units: Sequence[UnitProfile]) -> list[Shortening]:
    """Return the lists of blocks of `model` that can be cut, and how."""
    number = {unit.name: index for index, unit in enumerate(units) if unit.is_block}
    found = []
    for path, module in model.named_modules():
        names = [f"{path}.{child}" if path else child for child in module._modules]
        if not isinstance(module, nn.ModuleList) or not all(name in number for name in names):
            continue
        cut = shorten([kind_of(block) for block in module])
        if cut is not None:
            found.append(Shortening(path, tuple(number[name] for name in names), *cut))
    return found


def fake_clone(
    model: nn.Module,
    mode: FakeTensorMode,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
    shortenings: Sequence[Shortening] = (),
) -> nn.Module:
    """Return a copy of `model` in evaluation mode with fake tensors on `device`, its long lists of blocks cut.

    Args:
        model: any module, on any device, also meta; not changed, no value of it is read.
        mode: the mode the fake tensors belong to.
        device: where the fake tensors pretend to be.
        dtypes: dtype by `id` of the tensor, for those that will be cast when loaded.
        shortenings: lists of blocks to cut, and how.
    """
    memo: dict[int, object] = {}
    left_out = {id(block) for cut in shortenings for block in _blocks(model, cut)[cut.kept :]}
    memo.update((block, nn.Identity()) for block in left_out)
    for module in _modules_without(model, left_out):
        for registry in (module._parameters, module._buffers):
            for tensor in registry.values():
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = _fake(tensor, mode, device, dtypes.get(id(tensor), tensor.dtype))
    clone = copy.deepcopy(model, memo)
    for cut in shortenings:
        parent, _, leaf = cut.path.rpartition(".")
        setattr(clone.get_submodule(parent), leaf, nn.ModuleList(_blocks(clone, cut)[: cut.kept]))
    return clone.eval().requires_grad_(False)


def _blocks(model: nn.Module, cut: Shortening) -> list[nn.Module]:
    return list(model.get_submodule(cut.path).children())


def _modules_without(model: nn.Module, left_out: set[int]) -> list[nn.Module]:
    found, stack, seen = [], [model], set(left_out)
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            stack.extend(module.children())
    return found


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    with mode:
        fake = torch.empty(tensor.shape, dtype=dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=False)
    return fake
