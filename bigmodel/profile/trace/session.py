"""A session: a fake model that is called, and the recorded phases of the calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .recorder import Recorder
from .workload import Workload


class Session:
    """Calls a fake model and records its forwards as phases.

    Attributes:
        recorder: the recorder of its events.
        marks: (name, (first event, end), tokens of each sequence) of every phase so far.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, workload: Workload, device: torch.device) -> None:
        self.model = model
        self.workload = workload
        self.marks: list[tuple[str, tuple[int, int], int]] = []
        self.recorder = recorder
        self._device = device
        self._accepted = set(inspect.signature(model.forward).parameters)

    def phase(self, name: str, tokens: int, run: Callable[[], Any]) -> Any:
        """Record `run` as one phase and return its result."""
        first = len(self.recorder.events)
        result = run()
        self.marks.append((name, (first, len(self.recorder.events)), tokens))
        return result

    def call(self, **inputs: Any) -> Any:
        """Call the model with those of `inputs` that its forward takes."""
        inputs = {name: value for name, value in inputs.items() if name in self._accepted}
        return self.recorder.call(lambda: self.model(**inputs), inputs)

    def generate_with(
        self, kept: Sequence[torch.Tensor] = (), unread: Sequence[torch.Tensor] = (), **inputs: Any
    ) -> Any:
        """Call the model as `generate` does, with those of `inputs` that its forward takes.

        Args:
            kept: inputs that `generate` keeps after the call.
            unread: further tensors that it keeps and the model does not read; not passed to the model here.
            inputs: by name.
        """
        inputs = {name: value for name, value in inputs.items() if name in self._accepted}
        tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
        fresh = [tensor for tensor in tensors if not any(tensor is other for other in kept)]
        passed = [other for other in kept if any(other is tensor for tensor in tensors)]
        return self.recorder.call(lambda: self.model(**inputs), inputs, fresh, [*passed, *unread])

    def forward(self, tokens: int, **inputs: torch.Tensor) -> None:
        """Record one forward whose output is dropped at once; it processes `tokens` of each sequence."""

        def run() -> None:
            self.call(**inputs)

        self.phase("forward", tokens, run)

    def tokens(self, length: int) -> torch.Tensor:
        """Return fake token ids: int64, (batch, length)."""
        return torch.zeros(self.workload.batch_size, length, dtype=torch.long, device=self._device)

    def ids(self, count: int) -> torch.Tensor:
        """Return `count` fake token ids that belong to no sequence: int64, (count,)."""
        return torch.zeros(count, dtype=torch.long, device=self._device)

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return a fake sample of every sequence of the batch, in the model's dtype: (batch, *shape)."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return torch.zeros(self.workload.batch_size, *shape, dtype=dtype, device=self._device)

    def fake(self, value: Any) -> Any:
        """Return `value` with every tensor in it replaced by a fake one of its shape and dtype."""

        def one(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            return torch.zeros(item.shape, dtype=item.dtype, device=self._device)

        return tree_map(one, value)


class ConstantsThroughHost(TorchFunctionMode):
    """Has `torch.tensor(data, device=...)` read its data on the CPU; on another device it would make a real tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func not in (torch.tensor, torch.as_tensor) or device is None or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        constant = func(*args, **{**kwargs, "device": "cpu"})
        return torch.empty(constant.shape, dtype=constant.dtype, device=device)
