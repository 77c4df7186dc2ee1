"""The layer of a cache that a call of one block reads and writes: what it holds is a further argument and result.

Attention with a cache concatenates new keys and values to those of its own layer, and the old ones are freed. Such a
call can be replayed for another block if its layer of the cache holds tensors of equal shapes, and if the call accessed
its own layer alone, as that: the first block may access the first layer by its number, as all others do. `watched`
tells whether it did more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

POSITIONS = frozenset({"layer_idx", "layer_id", "layer_index"})
"""Attributes of modules that say which layer they belong to."""

LAYERS = "layers"
"""Attribute of a cache of transformers: a list with an object for each block, whose attributes are its tensors."""


def is_cache(value: Any) -> bool:
    """Return whether an argument is a cache with layers."""
    return isinstance(getattr(value, "__dict__", {}).get(LAYERS), list) and hasattr(type(value), "get_seq_length")


class CachedLayer:
    """The layer of a cache that belongs to a block.

    Args:
        cache: the cache.
        position: which of its layers it is.

    Attributes:
        layer: the object that holds keys and values.
    """

    def __init__(self, cache: Any, position: int) -> None:
        self.cache = cache
        self.position = position
        self.layer: Any = list.__getitem__(vars(cache)[LAYERS], position)

    @classmethod
    def of(cls, cache: Any, position: int) -> CachedLayer | None:
        """Return the layer of a cache at a position; None if it has none there."""
        return cls(cache, position) if 0 <= position < len(vars(cache)[LAYERS]) else None

    @property
    def state(self) -> Mapping[str, Any]:
        """Its attributes by name."""
        return vars(self.layer)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Attributes of the cache beside its layers, by name."""
        return {name: value for name, value in vars(self.cache).items() if name != LAYERS}

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[set[int]]:
        """Yield a set to which is added what is accessed of the cache's layers within the context, other than this one
        by the position that the parts of `module` have."""
        layers = vars(self.cache)[LAYERS]
        watched = _Watched(layers)
        members = [vars(part) for part in module.modules()]
        known = [(own, name, own[name]) for own in members for name in POSITIONS if name in own]
        setattr(self.cache, LAYERS, watched)
        for own, name, position in known:
            own[name] = _OwnPosition(position)
        try:
            yield watched.others
        finally:
            for own, name, position in known:
                own[name] = position
            setattr(self.cache, LAYERS, layers)
            if isinstance(layers, _Watched):  # for a block around the module
                layers.others |= watched.others
            if len(watched) != len(layers):  # some have been added
                watched.others.add(len(layers))
                layers[:] = list.__iter__(watched)


class _OwnPosition(int):
    """The position of the running block, which its type tells from an equal number."""


class _Watched(list[Any]):
    """A list that notes which of its members are accessed, but for that at the position of the running block."""

    def __init__(self, members: list[Any]) -> None:
        super().__init__(list.__iter__(members))
        self.others: set[int] = set()

    def __getitem__(self, position: Any) -> Any:
        if type(position) is not _OwnPosition:
            self.others.add(position if isinstance(position, int) else -1)
        return super().__getitem__(position)

    def __setitem__(self, position: Any, member: Any) -> None:
        self.others.add(-1)
        super().__setitem__(position, member)

    def __iter__(self) -> Iterator[Any]:
        self.others.add(-1)
        return super().__iter__()
