"""Which modules compute with what others inside them return, and so have it brought to where they compute."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn


def combining_module(modules: Mapping[str, nn.Module], name: str, whole: Collection[str]) -> str | None:
    """Return the module around `name` that computes with what `name` returns; None if that only passes it on.

    A module that holds tensors itself computes with them. Others do unless their model declares which modules must not
    be split, and thereby that all else may be.

    Args:
        modules: all modules of a model by name, the model itself under `""`.
        name: one of them.
        whole: names of the classes that must not be split.
    """
    if not name:
        return None
    around = name.rpartition(".")[0]
    while around and type(modules[around]).forward is nn.Module.forward:
        around = around.rpartition(".")[0]
    module = modules[around]
    declares = bool(getattr(modules[""], "_no_split_modules", None))
    holds = any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
    return around if holds or not declares or type(module).__name__ in whole else None
