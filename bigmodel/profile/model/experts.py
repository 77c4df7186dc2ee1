"""Experts that can be fetched one by one, and how many of them a call uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .tensors import TensorSpec


@dataclass(frozen=True)
class ExpertsProfile:
    """The experts of one module: fused tensors whose first dimension is the expert.

    Attributes:
        name: the module's name.
        count: number of experts.
        slots: bytes of one expert in each fused tensor by the tensor's name in the module, each aligned to `alignment`.
        storages: storage numbers of the fused tensors.
    """

    name: str
    count: int
    slots: tuple[tuple[str, int], ...]
    storages: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the slot of one expert."""
        return sum(nbytes for _, nbytes in self.slots)


@dataclass(frozen=True)
class RouterChoice:
    """A router's choice in one call: `per_token` distinct experts for each of `tokens` tokens, out of `count`."""

    tokens: int
    per_token: int
    count: int

    @property
    def rows(self) -> int:
        """Number of pairs of a token and an expert chosen for it."""
        return self.tokens * self.per_token

    @property
    def most(self) -> int:
        """Upper bound of the number of distinct experts used."""
        return min(self.count, self.rows)

    @property
    def wanted(self) -> float:
        """Expected number of distinct experts used, if all are equally likely, which routers are trained for."""
        return distinct_experts(self.count, self.tokens, self.per_token)


def distinct_experts(count: int, tokens: int, per_token: int = 1) -> float:
    """Return the expected number of `count` experts that at least one of `tokens` uses, each using `per_token`.

    One token skips a given expert with probability 1 - per_token / count, and all tokens skip it with that to the power
    of `tokens`.
    """
    return count * (1 - (1 - min(per_token / count, 1.0)) ** tokens)


def expert_names(module: nn.Module) -> list[str]:
    """Return the names of `module`'s fused expert tensors; empty if its experts cannot be fetched one by one.

    Those of classes that transformers decorates with ``use_experts_implementation`` can: any configured experts
    function, the class's own or one registered in ``ALL_EXPERTS_FUNCTIONS``, receives the tensors ``(experts, ...)``
    and the expert indices of each token.
    """
    count = getattr(module, "num_experts", None)
    decorated = hasattr(module, "is_transposed") and hasattr(getattr(module, "config", None), "_experts_implementation")
    if not decorated or not isinstance(count, int) or getattr(module, "_is_expert_parallel", False):
        return []
    own = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    if "forward" in module.__dict__ or any(t.dim() < 2 or t.shape[0] != count for t in own.values()):
        return []
    return list(own)


def profile_experts(name: str, module: nn.Module, specs: Sequence[TensorSpec], alignment: int) -> ExpertsProfile | None:
    """Return the experts of the module `name`; None if it has none that can be fetched one by one.

    Args:
        name: the module's full name.
        module: the module.
        specs: tensors as they will be loaded, the module's own among them.
        alignment: alignment in bytes of tensors in a slot.
    """
    names = expert_names(module)
    if not names:
        return None
    dot = f"{name}." if name else ""
    own = {spec.name.removeprefix(dot): spec for spec in specs if spec.name in {dot + tensor for tensor in names}}
    count = int(module.num_experts)  # type: ignore[arg-type]
    slots = tuple((tensor, -(-own[tensor].nbytes // count // alignment) * alignment) for tensor in names)
    return ExpertsProfile(name, count, slots, frozenset(spec.storage for spec in own.values()))
