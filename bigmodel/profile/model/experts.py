"""The experts of a mixture that can be brought to a device one by one, and how many of them a call wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .tensors import TensorSpec


@dataclass(frozen=True)
class ExpertsProfile:
    """The experts of one module: fused tensors whose first dimension counts them.

    Attributes:
        name: the module's name.
        count: how many there are.
        slots: bytes of one expert in each fused tensor by the tensor's name in the module, each aligned to `alignment`.
        storages: numbers of the fused tensors' storages.
    """

    name: str
    count: int
    slots: tuple[tuple[str, int], ...]
    storages: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the slot that one expert is brought into."""
        return sum(nbytes for _, nbytes in self.slots)


@dataclass(frozen=True)
class Choice:
    """A router's choice in one call: `per_token` different experts for each of `tokens` tokens, out of `count`."""

    tokens: int
    per_token: int
    count: int

    @property
    def wanted(self) -> float:
        """How many experts at least one token wants, on average, if all are as likely, as routers are trained to be."""
        return distinct_experts(self.count, self.tokens, self.per_token)


def distinct_experts(count: int, tokens: int, per_token: int = 1) -> float:
    """Return how many of `count` experts are wanted by at least one of `tokens`, each of which wants `per_token`."""
    return count * (1 - (1 - min(per_token / count, 1.0)) ** tokens)


def expert_names(module: nn.Module) -> list[str]:
    """Return the names of `module`'s fused expert tensors, none if its experts cannot be fetched one by one.

    They can for the classes that transformers decorates with ``use_experts_implementation``: whatever experts function
    is configured, a class's own or one registered in ``ALL_EXPERTS_FUNCTIONS``, it is given the tensors
    ``(experts, ...)`` and for each token the numbers of the experts it goes to.
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
    """Return the experts of the module called `name`; None if it has none that can be fetched one by one.

    Args:
        name: the module's full name.
        module: the module.
        specs: tensors, the module's own among them, as they will be loaded.
        alignment: bytes at whose multiples tensors in a slot begin.
    """
    names = expert_names(module)
    if not names:
        return None
    dot = f"{name}." if name else ""
    own = {spec.name.removeprefix(dot): spec for spec in specs if spec.name in {dot + tensor for tensor in names}}
    count = int(module.num_experts)  # type: ignore[arg-type]
    slots = tuple((tensor, -(-own[tensor].nbytes // count // alignment) * alignment) for tensor in names)
    return ExpertsProfile(name, count, slots, frozenset(spec.storage for spec in own.values()))
