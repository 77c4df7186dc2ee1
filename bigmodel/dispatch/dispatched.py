"""What a dispatched model carries: its attachments, its streamers, and the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import DispatchError
from ..plan import Plan
from .attach import AttachedForward, RefuseConversion
from .block import Registry
from .expert_cache import ExpertCache, expert_stats
from .options import Options
from .readahead import ReadAhead
from .streamer import Streamer

ATTRIBUTE = "_bigmodel_dispatched"
_PUBLIC = ("hf_device_map", "dispatch_stats")


class Dispatched:
    """Everything that dispatching added to one model, so that it can be taken away again.

    Args:
        main_device: Where its offloaded modules run.
        device_map: The map as it was given, device by module name.
        options: How it was dispatched.
        names: The names of its tensors; what the model has got since is not dispatched.
    """

    def __init__(
        self, main_device: torch.device, device_map: dict[str, Any], options: Options, names: frozenset[str]
    ) -> None:
        self.main_device = main_device
        self.device_map = device_map
        self.options = options
        self.names = names
        self.attachments: dict[str, AttachedForward] = {}
        self.streamers: list[Streamer] = []
        self.readers: list[ReadAhead] = []
        self.expert_caches: list[ExpertCache] = []
        self.plan: Plan | None = None
        self.ties: dict[str, str] = {}
        """For each further name of a tied tensor, its first name."""

    def forward_of(self, name: str, module: nn.Module) -> AttachedForward:
        """Return the attachment of the module `name`, making it if there is none yet."""
        if name not in self.attachments:
            self.attachments[name] = AttachedForward(module, None, None)
        return self.attachments[name]

    def attach(self, model: nn.Module) -> None:
        """Put all attachments in place and mark `model` as dispatched."""
        for attachment in self.attachments.values():
            attachment.attach()
        model.__dict__[ATTRIBUTE] = self
        model.__dict__["hf_device_map"] = self.device_map
        model.__dict__["dispatch_stats"] = self.stats

    def guard(self, model: nn.Module) -> None:
        """Refuse to move or cast `model` or any part of it."""
        for module in model.modules():
            module.__dict__["_apply"] = RefuseConversion()

    def stats(self) -> dict[str, Any]:
        """Return the streaming counters by device: bytes, fetches, hits, misses, seconds waited. Those of experts that
        are fetched one by one are apart, under ``"experts"``."""
        counters: dict[str, Any] = {str(streamer.device): streamer.stats.as_dict() for streamer in self.streamers}
        if self.expert_caches:
            counters["experts"] = expert_stats(self.expert_caches)
        return counters

    def detach(self, model: nn.Module) -> None:
        """Give every module its own forward and `model` its own attributes back."""
        for attachment in self.attachments.values():
            attachment.detach()
        for module in model.modules():
            module.__dict__.pop("_apply", None)
        for name in (ATTRIBUTE, *_PUBLIC):
            model.__dict__.pop(name, None)

    def release(self) -> None:
        """Let go of device memory and threads, once detached."""
        self.attachments.clear()
        self.streamers.clear()
        self.readers.clear()
        self.expert_caches.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise DispatchError("a dispatched model cannot be copied; call undispatch(model) first")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DispatchError("a dispatched model cannot be pickled; call undispatch(model) first")


def dispatched(model: nn.Module) -> Dispatched | None:
    """Return what `dispatch_model` left on `model`, None if it is not dispatched."""
    found: Dispatched | None = model.__dict__.get(ATTRIBUTE)
    return found


class Journal:
    """Remembers every tensor that was replaced in a model, so that a failure leaves the model as it was."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Registry, str, torch.Tensor]] = []

    def replace(self, registry: Registry, key: str, tensor: torch.Tensor) -> None:
        """Put `tensor` in the place of what `registry` holds under `key`."""
        self._replaced.append((registry, key, registry[key]))
        registry[key] = tensor

    def undo(self) -> None:
        """Put everything back."""
        for registry, key, tensor in reversed(self._replaced):
            registry[key] = tensor
