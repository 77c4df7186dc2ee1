"""Which layers of a model the host can compute packed, what they take, and how a plan says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from ..errors import PlanError
from .host_kernels import HostKernel, PlannedProduct
from .linear import QuantizedLinear


def packable(model: nn.Module) -> dict[str, tuple[QuantizedLinear, HostKernel]]:
    """Return the layers of `model` that a kernel of the host can compute, by name.

    Layers that share a stored tensor with another module, as a head with its embedding, are left out: that restores it.
    """
    owners = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values())
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear) and all(owners[id(getattr(module, own))] == 1 for own in module.stored):
            try:
                found[name] = module, module.kernel()
            except ValueError:
                continue
    return found


def plan_products(model: nn.Module) -> None:
    """Have all layers of a copy of a model for dry runs compute packed that a kernel of the host can compute."""
    for layer, kernel in packable(model).values():
        layer.packed = PlannedProduct(kernel)


def packed_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes that are kept in memory for each stored tensor of the layers that can be packed, by its name.

    They are those of its share of the copy, or of itself where it is used as it is.
    """
    found = {}
    for name, (layer, kernel) in packable(model).items():
        for own, leaf in layer.stored.items():
            stored = getattr(layer, own)
            found[f"{name}.{own}"] = kernel.kept_bytes(leaf, stored)
    return found


def packing_note(model: nn.Module) -> str:
    """Return a sentence about what the host computes packed, for the notes of a plan.

    Raises:
        PlanError: no weight of the model can be packed; the message says why the first cannot.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    count = len(packable(model))
    if not count:
        raise PlanError(f"host_kernels='packed': {_reason(layers)}; leave it out")
    return (
        f"{count} of {len(layers)} quantised linear layers are computed packed where RAM holds them and the host "
        "computes: outputs are those of its kernels, not bit for bit those of restored weights"
    )


def _reason(layers: Mapping[str, QuantizedLinear]) -> str:
    for name, layer in layers.items():
        try:
            layer.kernel()
        except ValueError as error:
            return f"{name} cannot be computed so: {error}"
    return "no linear layer of this model has quantised weights of its own"
