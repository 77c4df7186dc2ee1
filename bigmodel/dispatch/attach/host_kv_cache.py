"""Layers of transformers' caches whose keys and values lie on the host (`HostKVLayer`), and how caches get them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ...devices import HOST, Event
from ...errors import DispatchError
from ..streaming.host_kv import KVFetcher, KVFetchers


class _Order:
    """The layers of one cache that lie on the host, in the order they are read; referenced weakly, without cycles."""

    def __init__(self) -> None:
        self._layers: list[tuple[int, weakref.ref[HostKVLayer]]] = []

    def add(self, index: int, layer: HostKVLayer) -> None:
        self._layers = sorted([*self._layers, (index, weakref.ref(layer))], key=lambda item: item[0])

    def following(self, layer: HostKVLayer, count: int) -> list[HostKVLayer]:
        alive = [found for _, reference in self._layers if (found := reference()) is not None]
        at = next(place for place, each in enumerate(alive) if each is layer)
        others = [*alive[at + 1 :], *alive[:at]]
        return [each for each in others if each.is_initialized and each.device == layer.device][:count]


class HostKVLayer(DynamicLayer):
    """A layer of `DynamicCache` whose keys and values lie on the host between its updates.

    What `update` returns is bit for bit that of `DynamicLayer`. `keys` and `values` are copies on the host.

    Args:
        fetchers: Fetch them to the accelerator that runs the layer.
        index: Number of the layer in its cache.
        order: The layers of its cache that lie on the host.
    """

    def __init__(self, fetchers: KVFetchers, index: int, order: _Order) -> None:
        self._fetchers = fetchers
        self._fetcher: KVFetcher | None = None
        self._index = index
        self._order = order
        self._has_gradients = False
        self.rows = fetchers.new_rows(), fetchers.new_rows()
        self.version = 0
        self.written: Event | None = None
        order.add(index, self)
        super().__init__()

    def following(self, count: int) -> list[HostKVLayer]:
        """Return the layers of its cache that are read next on its device."""
        return self._order.following(self, count)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note dtype and device of the keys and values to come."""
        del value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values where the new ones are, and keep these on the host.

        Raises:
            DispatchError: gradients would have to flow to keys and values of an earlier call.
        """
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._has_gradients and torch.is_grad_enabled():
            raise DispatchError(
                "keys and values on the host do not carry gradients from one call to the next: run the calls under "
                "torch.no_grad(), or plan for a shorter context, whose keys and values stay on the device"
            )
        self._has_gradients = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        self.device = key_states.device
        if key_states.device.type == HOST:
            return self._update_on_host(key_states, value_states)
        self._fetcher = self._fetchers.of(key_states.device)
        return self._fetcher.update(self, key_states, value_states)

    def _update_on_host(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        past = [self.keys, self.values]
        for rows, new in zip(self.rows, (key, value), strict=True):
            _append(rows, new)
        self.version += 1
        keys = key.clone() if past[0] is None else torch.cat([past[0], key], dim=-2)
        values = value.clone() if past[1] is None else torch.cat([past[1], value], dim=-2)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self.rows[0].length

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of all keys [sequences, heads, tokens, dim] on the host; None if there are none."""
        return self._copied(0)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._replace(0, value)

    @property
    def values(self) -> torch.Tensor | None:
        """The same of values."""
        return self._copied(1)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._replace(1, value)

    def _copied(self, which: int) -> torch.Tensor | None:
        self._wait()
        return self.rows[which].tensor() if self.rows[which].length else None

    def _replace(self, which: int, value: torch.Tensor | None) -> None:
        self._wait()
        self.version += 1
        self.rows[which].keep(0)
        if value is not None and value.numel():
            _append(self.rows[which], value.detach().to(HOST))

    def _wait(self) -> None:
        """Wait until the host may read and write the rows."""
        if self._fetcher is not None:
            self._fetcher.synchronize()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; `tokens_to_remove` is negative."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give a negative number, of the tokens to remove")
        if tokens_to_remove:
            self.version += 1
            for rows in self.rows:
                rows.keep(rows.length + tokens_to_remove)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these sequences."""
        super().batch_select_indices(indices.to(HOST))

    def offload(self) -> None:
        """Do nothing: the layer is on the host."""

    def prefetch(self) -> None:
        """Do nothing: the layer is fetched by itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> HostKVLayer:
        order = memo.setdefault(id(self._order), _Order())
        copied = HostKVLayer(self._fetchers, self._index, order)
        if self.is_initialized:
            copied.dtype, copied.device, copied.is_initialized = self.dtype, self.device, True
            copied.keys, copied.values = self.keys, self.values
        return copied


def _append(rows: Any, new: torch.Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        at, source = 0, new.detach().permute(2, 0, 1, 3)
        for target in rows.grow(new):
            target.copy_(source[at : at + len(target)])
            at += len(target)


class KVOnHost:
    """Gives caches layers on the host before the module that writes to them runs: a forward pre-hook.

    Args:
        fetchers: What the caches of one model share.
        indices: The layers of a cache that the module writes to.
    """

    def __init__(self, fetchers: KVFetchers, indices: set[int]) -> None:
        self._fetchers = fetchers
        self._indices = sorted(indices)

    def __call__(self, module: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache) and not getattr(value, "offloading", False):
                for index in self._indices:
                    self._adopt(value, index)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVOnHost:
        return self

    def _adopt(self, cache: Any, index: int) -> None:
        """Replace layer `index` of a cache, one that grows, by one on the host, with what it holds."""
        layers = cache.layers
        if cache.layer_class_to_replicate is DynamicLayer:
            while len(layers) <= index:
                layers.append(DynamicLayer())
        if index >= len(layers) or type(layers[index]) is not DynamicLayer:
            return
        before = layers[index]
        order = next(_orders(layers), None) or _Order()
        layers[index] = HostKVLayer(self._fetchers, index, order)
        if before.is_initialized and before.get_seq_length():
            layers[index].lazy_initialization(before.keys, before.values)
            layers[index].keys, layers[index].values = before.keys, before.values


def _orders(layers: list[Any]) -> Iterator[_Order]:
    return (layer._order for layer in layers if isinstance(layer, HostKVLayer))
