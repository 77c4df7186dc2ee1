"""Blocks that are streamed to the device for calls of many tokens, and computed on the host for calls of few.

Its weights lie in host memory. With many tokens, as of a prompt, they are worth bringing to the accelerator; with few,
as in a step of generation, the activations move instead, and the block's keys and values once, when one kind of call
follows the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...devices import HOST, torch_device
from ...devices.nested import first_tensor, send_to_device
from ..weights.visits import Visited

_PARTS_OF_CACHE = ("self_attention_cache", "cross_attention_cache")


class HostOrDevice(Visited[bool, bool]):
    """Decides for each call of one block where it is computed, and keeps threads apart that differ in that. A visit
    asks whether it may compute on the host (True) or the device (False), and holds that.

    While a block is on the device its module shows the weights there, so that nobody can compute it on the host
    meanwhile, and the other way round.

    Args:
        below: Calls of fewer tokens are computed on the host.
        layers: Which layers of a key-value cache the block writes to.
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
        """Return where a call is computed that runs on `device` if it has many tokens."""
        return torch_device(HOST) if tokens_of(args, kwargs) < self.below else device

    def bring_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> None:
        """Move the block's keys and values, in whatever cache it is called with, to `device`."""
        for value in (*args, *kwargs.values()):
            for layers in _cache_layers(value):
                for index in self.layers:
                    if index < len(layers):
                        move_layer(layers[index], device)

    def _enter(self, on_host: bool, held: list[bool]) -> None:
        """Wait until no other thread computes the block elsewhere."""
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
    """Return how many tokens a module is called with: rows of the first tensor, whose last dimension are features."""
    tensor = first_tensor((args, kwargs))
    if tensor is None:
        return 0
    return tensor.numel() // max(tensor.shape[-1], 1) if tensor.dim() and tensor.is_floating_point() else tensor.numel()


def layers_of(module: nn.Module) -> set[int]:
    """Return which layers of a key-value cache a part of a transformers model writes to."""
    found = (getattr(part, "layer_idx", None) for part in module.modules())
    return {index for index in found if isinstance(index, int)}


def move_layer(layer: Any, device: torch.device) -> None:
    """Move every tensor of one layer of a cache, of whatever kind, to `device`; one not yet begun begins there."""
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
    """Yield the layers of `value` if it is a cache, and of its parts if it consists of several."""
    layers = getattr(value, "layers", None)
    if isinstance(layers, list):
        yield layers
    for name in _PARTS_OF_CACHE:
        part = getattr(value, name, None)
        if part is not None:
            yield from _cache_layers(part)
