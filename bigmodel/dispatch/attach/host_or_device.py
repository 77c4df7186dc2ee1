"""Blocks that are streamed to the device for calls of many tokens, and computed on the host for calls of few.

Their weights are in host memory. For a call of many tokens, such as a prompt, copying the weights to the accelerator
pays; for few, as in a step of generation, the activations move to the host instead. The block's keys and values move
whenever the device changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ...devices import HOST, torch_device
from ...devices.nested import first_tensor, send_to_device
from ..weights.visits import Visited

_INNER_CACHES = ("self_attention_cache", "cross_attention_cache")


class HostOrDevice(Visited[bool, bool]):
    """Decides the device of each call of one block, and excludes concurrent calls on the other device.

    A visit requests the host (True) or the device (False) and holds it. While a call runs on the device the module's
    parameters refer to device memory, so no other thread can compute it on the host, and vice versa.

    Args:
        below: Calls of fewer tokens are computed on the host.
        layers: Indices of the layers of a key-value cache that the block writes to.
    """

    def __init__(self, below: int, layers: Collection[int]) -> None:
        self.below = below
        self.layers = frozenset(layers)
        self.start()

    def _start(self) -> None:
        super()._start()
        self._on_host = False
        self._users = 0

    def device_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> torch.device:
        """Return the device of a call: the host for fewer than `below` tokens, else `device`."""
        return torch_device(HOST) if tokens_of(args, kwargs) < self.below else device

    def move_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> None:
        """Move the block's keys and values, in any cache among the arguments, to `device`."""
        for value in (*args, *kwargs.values()):
            for layers in _cache_layers(value):
                for index in self.layers:
                    if index < len(layers):
                        move_layer(layers[index], device)

    def _enter(self, on_host: bool, held: list[bool]) -> None:
        """Wait until no other thread computes the block on the other device."""
        with self._lock:
            while self._users and self._on_host != on_host:
                self._changed.wait()
            self._on_host = on_host
            self._users += 1
            held.append(on_host)

    def _leave(self, held: list[bool]) -> None:
        with self._lock:
            if held:
                self._users -= 1
                del held[:]
            self._changed.notify_all()


def tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of tokens of a call: the rows of its first tensor, or its elements if they are integers."""
    tensor = first_tensor((args, kwargs))
    if tensor is None:
        return 0
    return tensor.numel() // max(tensor.shape[-1], 1) if tensor.dim() and tensor.is_floating_point() else tensor.numel()


def move_layer(layer: Any, device: torch.device) -> None:
    """Move every tensor of one layer of a cache, of any class, to `device`; an uninitialised one is left alone."""
    if not getattr(layer, "is_initialized", True):
        return
    for name, value in vars(layer).items():
        if isinstance(value, torch.device):
            moved: Any = device
        elif isinstance(value, (torch.Tensor, list, tuple, dict)):
            moved = send_to_device(value, device)
        else:
            continue
        if moved is not value:
            setattr(layer, name, moved)


def _cache_layers(value: Any) -> Iterator[list[Any]]:
    """Yield the layers of `value` if it is a cache, and of the caches inside it."""
    layers = getattr(value, "layers", None)
    if isinstance(layers, list):
        yield layers
    for name in _INNER_CACHES:
        inner = getattr(value, name, None)
        if inner is not None:
            yield from _cache_layers(inner)
