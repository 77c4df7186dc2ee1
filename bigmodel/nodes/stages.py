"""One stage of a model in its process: takes hidden states from the stage before, and hands its own on.

The first stage is a model like any other to its user: `generate` and calls work, and each call of its forward makes all
stages run theirs. The others follow. Each stage keeps keys and values of its own layers, by the number that the first
gives the cache.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from ..errors import ServeError
from ..profile.model.stage import PassedHead, PassedLayer, layers_of
from .messages import Peer

_TENSORS = ("input_ids", "attention_mask", "position_ids")
_KNOWN = frozenset({*_TENSORS, "past_key_values", "use_cache", "logits_to_keep", "return_dict"})

_REORDERING = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices")
"""Methods of a cache that other stages would have to follow."""


def _refuse_reordering(*_: Any, **__: Any) -> None:
    raise ServeError("a model over several nodes does not reorder its cache: generate without beams")


@dataclass
class _Call:
    """One forward as all stages run it.

    Attributes:
        values: number of the cache, tokens in it, logits to keep, and caches that are no longer used.
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
    """

    model: Any
    start: int
    stop: int
    before: Peer | None
    behind: Peer | None
    ends: Peer | None
    _call: _Call | None = None
    _caches: dict[int, Any] = field(default_factory=dict)
    _dropped: list[int] = field(default_factory=list)
    _numbers: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    _count: int = 0
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
        """Run this stage in each forward of the first one, until that ends.

        Raises:
            ServeError: a stage beside this one is gone.
        """
        assert self.before is not None
        while True:
            values, tensors = self.before.receive()
            if "stop" in values:
                if self.behind is not None:
                    self.behind.send(values, {})
                return
            hidden = tensors.pop("hidden")
            self._call = _Call(values, tensors, hidden)
            output = self._forward(**tensors, **self._arguments(values))
            if self.behind is None and self.ends is not None:
                self.ends.send({}, {"logits": output.logits})

    def stop_others(self) -> None:
        """End the processes that follow this one."""
        if self.behind is not None:
            self.behind.send({"stop": True}, {})

    def _arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call beside its tensors: the cache as the first stage has it, logits to keep."""
        from transformers import DynamicCache

        for number in values["dropped"]:
            self._caches.pop(number, None)
        number, keep = values["cache"], values["logits_to_keep"]
        if number is None:
            return {"use_cache": False, "logits_to_keep": keep}
        cache = self._caches.setdefault(number, DynamicCache(config=self.model.config))
        if cache.get_seq_length() > values["past"]:
            cache.crop(values["past"])
        return {"use_cache": True, "past_key_values": cache, "logits_to_keep": keep}

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
        keep = kwargs.get("logits_to_keep") or 0
        with self._lock:
            values = {
                "cache": None if cache is None else self._number(cache),
                "past": 0 if cache is None else int(cache.get_seq_length()),
                "logits_to_keep": int(keep),
                "dropped": [self._dropped.pop() for _ in range(len(self._dropped))],
            }
            self._call = _Call(values, inputs)
            return self._forward(**kwargs)

    def _number(self, cache: Any) -> int:
        if cache not in self._numbers:
            self._count += 1
            self._numbers[cache] = self._count
            weakref.finalize(cache, self._dropped.append, self._count)
            for name in _REORDERING:
                setattr(cache, name, _refuse_reordering)
        return self._numbers[cache]

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


def _passed(layer: nn.Module) -> PassedLayer:
    assert isinstance(layer, PassedLayer)
    return layer
