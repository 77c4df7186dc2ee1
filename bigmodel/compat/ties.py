"""Weights that transformers ties when it has loaded them, by the names that a model declares."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..devices import DISK, HOST
from ..profile.model.tensors import owner_of


@contextmanager
def ties_made(model: nn.Module) -> Iterator[None]:
    """Within the body, weights that transformers will tie are one: a model that is not loaded yet has two on meta."""
    known = dict(model.named_parameters(remove_duplicate=False))
    kept: list[tuple[dict[str, Any], str, Any]] = []
    ties: MutableMapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    try:
        for name, source in ties.items():
            if name in known and source in known:
                owner, _, key = name.rpartition(".")
                registry: dict[str, Any] = model.get_submodule(owner)._parameters
                kept.append((registry, key, registry[key]))
                registry[key] = known[source]
        yield
    finally:
        for registry, key, parameter in reversed(kept):
            registry[key] = parameter


def keep_ties_in_memory(model: Any, places: MutableMapping[str, Any]) -> None:
    """Put a tied weight on the host that a map has there, or on an accelerator, and on disk: transformers makes the
    weight of both names one, and it would lie in one of these places only."""
    for names in getattr(model, "all_tied_weights_keys", {}).items():
        owners = {name: owner_of(name, places) for name in names}
        at = {name: places[owner] for name, owner in owners.items() if owner is not None}
        if DISK in at.values() and len(set(at.values())) > 1:
            places.update({name.rpartition(".")[0] or name: HOST for name in names if at.get(name) == DISK})


def read_ties_from_one_place(model: Any, device_map: MutableMapping[str, Any], index: MutableMapping[str, Any]) -> None:
    """Leave both names of a tied weight on disk where one is: transformers compares their values otherwise."""
    for names in getattr(model, "all_tied_weights_keys", {}).items():
        owners = [owner_of(name, device_map) for name in names]
        places = {device_map[owner] for owner in owners if owner is not None}
        if DISK in places and len(places) > 1:
            device_map.update(dict.fromkeys(names, DISK))
            entry = next((index[name] for name in names if name in index), None)
            if entry is not None:
                index.update(dict.fromkeys(names, entry))
