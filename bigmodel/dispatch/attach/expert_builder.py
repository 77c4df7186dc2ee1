"""Find the experts that are fetched one by one, build their caches, and attach the modules that compute them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import nn

from ...devices import HOST, device_key
from ...plan import Plan
from ...plan.memory.usage import share_cache
from ...profile import expert_names, storage_key
from ..experts.cache import ExpertCache
from ..experts.forward import ExpertForward
from ..experts.layer import ExpertLayer
from ..placement.tensors import DeviceMapLookup, PlacedTensor
from ..weights.block import HostTensor
from ..weights.fused_view import FusedView
from .dispatched import Dispatched
from .pinned_memory import PinnedBudget


class ExpertBuilder:
    """Finds the offloaded experts of one model and attaches their modules to expert caches.

    Args:
        modules: The model's modules by name.
        placed: Its tensors by name.
        placement: Storage and execution device of every module.
        device_dtype: Returns the dtype of a tensor on its execution device.
        needs_streaming: Whether a tensor must be copied to its execution device.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        placed: Mapping[str, PlacedTensor],
        placement: DeviceMapLookup,
        device_dtype: Callable[[PlacedTensor, torch.Tensor], torch.dtype],
        needs_streaming: Callable[[PlacedTensor], bool],
    ) -> None:
        self._modules = modules
        self._placed = placed
        self._placement = placement
        self._device_dtype = device_dtype
        self._needs_streaming = needs_streaming

    def find(self) -> dict[str, ExpertLayer]:
        """Return the experts that are fetched one by one, by the name of their module."""
        layers: dict[str, ExpertLayer] = {}
        seen: set[object] = set()
        for name, module in self._modules.items():
            tensors: dict[str, HostTensor] = {}
            for parameter in expert_names(module):
                placed = self._placed[f"{name}.{parameter}"]
                tensor = placed.registry[placed.key]
                key = storage_key(tensor)
                if key in seen or not self._is_fetched(placed):
                    break
                seen.add(key)
                dtype = self._device_dtype(placed, tensor)
                tensors[parameter] = HostTensor(tensor, dtype, [(placed.registry, placed.key)])
            else:
                if tensors:
                    layers[name] = ExpertLayer(name, tensors)
        return layers

    def _is_fetched(self, placed: PlacedTensor) -> bool:
        if placed.computed_below:
            # The host computes calls of few tokens; calls of many tokens use nearly all experts.
            return False
        is_fused_view = isinstance(placed.registry[placed.key], FusedView)
        return placed.offloaded and (is_fused_view or self._needs_streaming(placed))

    def attach(self, layers: Mapping[str, ExpertLayer], result: Dispatched, plan: Plan, pinned: PinnedBudget) -> None:
        """Build the expert caches and attach the modules that use them.

        Args:
            layers: What `find` returned.
            result: Receives the caches and attachments.
            plan: Gives the bytes of the expert cache on each device.
            pinned: Budget of pinned host memory.
        """
        by_device: dict[torch.device, list[tuple[str, ExpertLayer]]] = defaultdict(list)
        for name, layer in layers.items():
            by_device[self._device(name, plan)].append((name, layer))
        for device, here in by_device.items():
            kinds: dict[object, list[tuple[str, ExpertLayer]]] = defaultdict(list)
            for name, layer in here:
                kinds[layer.signature].append((name, layer))
            sizes = [(kind[0][1].layout.nbytes, sum(layer.experts for _, layer in kind)) for kind in kinds.values()]
            shares = share_cache(plan.expert_cache[device_key(device)], sizes)
            for kind, slots in zip(kinds.values(), shares, strict=True):
                cache = ExpertCache(
                    device, [layer for _, layer in kind], slots, staging_bytes=plan.staging_bytes, readers=plan.readers
                )
                result.expert_caches.append(cache)
                for name, layer in kind:
                    if pinned.take(*(tensor.nbytes for tensor in layer.in_memory)):
                        layer.pin()
                    forward = result.forward_of(name, self._modules[name])
                    forward.device = device
                    forward.compute = ExpertForward(
                        self._modules[name], layer, cache, plan.gradient_bytes, plan.expert_split
                    )

    def _device(self, name: str, plan: Plan) -> torch.device:
        """Return the execution device of a module's experts: that of the resident tensors around it, such as its
        router, if the plan has an expert cache there; else the main device."""
        own = next(placed for tensor, placed in self._placed.items() if tensor.startswith(f"{name}."))
        if own.execution_device == HOST:
            return torch.device(HOST)
        enclosing = f"{name.rpartition('.')[0]}."
        resident = (p.storage_device for n, p in self._placed.items() if n.startswith(enclosing) and not p.offloaded)
        with_cache = (device for device in resident if device_key(device) in plan.expert_cache)
        return torch.device(next(with_cache, self._placement.main_device))
