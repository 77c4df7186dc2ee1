"""The base of modules that hold their weights as stored, and which tensors of a model are stored so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class StoredModule(nn.Module):
    """A module some of whose parameters are tensors as a checkpoint stores them: never cast, and never trained.

    Attributes:
        stored: published name of each such parameter, by its name in the module. They differ only where the published
            one has a dot, which no parameter's name may have.
        compute_dtype: dtype that weights are restored to.
    """

    stored: dict[str, str]
    compute_dtype: torch.dtype

    def add_stored(self, published: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """Add a parameter on meta for the stored tensor `published`; return its name."""
        name = published.replace(".", "_")
        empty = torch.empty(shape, dtype=dtype, device="meta")
        self.stored[name] = published
        self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        return name

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StoredModule:
        """Move stored tensors, but do not cast them: a cast changes the dtype that weights are restored to."""
        kept = {id(self._parameters[name]) for name in self.stored}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if id(tensor) not in kept or moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, recurse)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        super()._save_to_state_dict(own, "", keep_vars)
        destination.update({prefix + self.stored.get(name, name): tensor for name, tensor in own.items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, published in self.stored.items():
            if name != published and prefix + published in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + published)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def stored_names(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters that are tensors as a checkpoint stores them."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, StoredModule)
        for name in module.stored
    )
