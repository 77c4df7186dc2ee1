"""Which names of a model are one tensor."""

from __future__ import annotations

from typing import Any

from torch import nn

from .tensors import named_tensors, storage_key


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """Return the groups of parameter names that share memory, each sorted, the groups sorted too.

    One pass over the names, so linear in their number; works on the meta device. Two parameters are tied
    when they are the same object or view exactly the same part of one storage.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensor, is_buffer, _persistent in named_tensors(model):
        if not is_buffer:
            groups.setdefault(storage_key(tensor), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Make every name of each group one parameter again: the first that is not on meta, else the first.

    Args:
        model: changed in place.
        tied_params: groups of names as `find_tied_parameters` returns them.
    """
    for names in tied_params:
        found = [_owner(model, name) for name in names]
        candidates = [owner._parameters[leaf] for owner, leaf in found]
        real = [p for p in candidates if p is not None and not p.is_meta]
        keep = real[0] if real else next((p for p in candidates if p is not None), None)
        if keep is None:
            continue
        for owner, leaf in found:
            owner._parameters[leaf] = keep


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return (model.get_submodule(path) if path else model), leaf
