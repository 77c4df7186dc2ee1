"""One stage of a model in its process: takes hidden states from the stage before, and hands its own on.

The first stage is a model like any other to its user: `generate` and calls work, and each call of its forward makes all
stages run theirs. The others follow. Each stage keeps keys and values of its own layers, by the number that the first
gives the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from ..dispatch.attach.dispatched import dispatched
from ..errors import NodeLostError, ServeError
from ..profile.model.stage import PassedHead, PassedLayer, layers_of
from .caches import NumberedCaches
from .messages import Peer

_TENSORS = ("input_ids", "attention_mask", "position_ids")
_KEEP = "logits_to_keep"
_KNOWN = frozenset({*_TENSORS, "past_key_values", "use_cache", _KEEP, "return_dict"})


@dataclass
class _Call:
    """One forward as all stages run it.

    Attributes:
        values: which cache it has, as `NumberedCaches.tell` returns it, and how many logits to keep.
        inputs: the tensors of the call.
        hidden: hidden states that came from the stage before.
    """

    values: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    hidden: torch.Tensor | None = None


@dataclass
class RunningStage:
    """A stage with the stages beside it.

    Args:
        model: the loaded stage, as `cut_stage` leaves it.
        start: its first layer.
        stop: the layer behind its last one.
        before: the stage before; None on the first.
        behind: the stage behind; None on the last.
        ends: on the first stage the last one, and on the last the first: between them go logits.
        caches: keys and values of the stages that follow.
    """

    model: Any
    start: int
    stop: int
    before: Peer | None
    behind: Peer | None
    ends: Peer | None
    caches: NumberedCaches = field(default_factory=NumberedCaches)
    _call: _Call | None = None
    _lost: NodeLostError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        layers = layers_of(self.model)
        self._forward: Callable[..., Any] = self.model.forward
        if self.before is not None:
            _passed(layers[self.start - 1]).exchange = self._take
        if self.behind is not None:
            _passed(layers[self.stop]).exchange = self._give
        if self.before is None and self.ends is not None:
            head = self.model.lm_head
            assert isinstance(head, PassedHead)
            head.exchange = self._take_logits
            self.model.forward = update_wrapper(partial(self._lead), self._forward)

    def follow(self) -> None:
        """Run this stage in each forward of the first one, until that ends; then close the connections.

        Raises:
            NodeLostError: a stage beside this one is gone.
        """
        try:
            self._follow()
        finally:  # whoever waits for this stage need not wait for the end of the process
            for peer in (self.before, self.behind, self.ends):
                if peer is not None:
                    peer.close()

    def _follow(self) -> None:
        assert self.before is not None
        device = _input_device(self.model)
        while True:
            values, tensors = self.before.receive()
            if "stop" in values:
                if self.behind is not None:
                    self.behind.send(values, {})
                return
            hidden = tensors.pop("hidden")
            self._call = _Call(values, dict(tensors), hidden)
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
            keep = tensors.pop(_KEEP, values[_KEEP])
            with self.caches.follow(values, self.model) as cached:
                output = self._forward(**tensors, **{_KEEP: keep}, **cached)
            if self.behind is None and self.ends is not None:
                self.ends.send({}, {"logits": output.logits})

    def stop_others(self) -> None:
        """End the processes that follow this one."""
        if self.behind is not None:
            self.behind.send({"stop": True}, {})

    def _lead(self, *args: Any, **kwargs: Any) -> Any:
        """Called in the place of the first stage's forward."""
        from transformers import DynamicCache

        if args:
            kwargs = {"input_ids": args[0], **kwargs} if len(args) == 1 else kwargs
        unknown = sorted(name for name, value in kwargs.items() if name not in _KNOWN and value is not None)
        if unknown or len(args) > 1 or kwargs.get("input_ids") is None:
            wrong = unknown[0] if unknown else "no input_ids by name"
            raise ServeError(
                f"a model over several nodes was called with {wrong}; it takes {', '.join(sorted(_KNOWN))}"
            )
        cache = kwargs.get("past_key_values")
        if cache is None and kwargs.get("use_cache", True):
            cache = kwargs["past_key_values"] = DynamicCache(config=self.model.config)
        inputs = {name: kwargs[name] for name in _TENSORS if kwargs.get(name) is not None}
        keep = kwargs.get(_KEEP)
        if isinstance(keep, torch.Tensor):
            inputs[_KEEP] = keep
        inputs = {name: tensor.cpu() for name, tensor in inputs.items()}  # before there is work to wait for
        with self._lock:
            if self._lost is not None:  # nothing that stages hold of the call that failed is right any more
                raise self._lost
            values = {**self.caches.tell(cache), _KEEP: 0 if keep is None or _KEEP in inputs else int(keep)}
            self._call = _Call(values, inputs)
            try:
                return self._forward(**kwargs)
            except NodeLostError as error:
                self._lost = error
                raise

    def _take(self, passed: torch.Tensor) -> torch.Tensor:
        assert self._call is not None
        assert self._call.hidden is not None
        return self._call.hidden.to(passed.device)

    def _give(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._call is not None
        assert self.behind is not None
        self.behind.send(self._call.values, {**self._call.inputs, "hidden": hidden})
        return hidden

    def _take_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.ends is not None
        _, tensors = self.ends.receive()
        return tensors["logits"].to(hidden.device)


def _input_device(model: nn.Module) -> torch.device:
    """Return the device of a stage's inputs."""
    found = dispatched(model)
    return next(model.parameters()).device if found is None else found.main_device


def _passed(layer: nn.Module) -> PassedLayer:
    assert isinstance(layer, PassedLayer)
    return layer
