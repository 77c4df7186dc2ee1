"""Models that bring a tensor to the device of one of their weights, as in `x.to(self.conv.weight.device)`.

All fake tensors are on one device, so nothing would be recorded. Where the two lie on different devices, the model that
runs for real makes a copy, beside the tensor that it was made of. So the recorder is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from .recorder import Recorder


class BroughtToWeights(TorchFunctionMode):
    """Tells a recorder of tensors that are brought to the device of a weight, by `Tensor.to`.

    Each weight gets an object of its own that stands for its device, equal to those of all other tensors.

    Args:
        recorder: follows the units of `model`.
        model: the fake model.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        super().__init__()
        self._recorder = recorder
        self._units: dict[int, tuple[torch.device, int]] = {}  # by id: the device of a weight, and its unit
        self._weights: set[int] = set()
        for tensor in (*model.parameters(), *model.buffers()):
            unit = recorder.unit_of(tensor)
            if unit is not None and isinstance(tensor, FakeTensor):
                self._device = tensor.device
                tensor.fake_device = torch.device(tensor.device.type, tensor.device.index)
                self._units[id(tensor.fake_device)] = tensor.fake_device, unit
                self._weights.add(id(tensor))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            computed = isinstance(tensor, FakeTensor) and id(tensor) not in self._weights
            if computed and id(tensor.fake_device) in self._units:
                tensor.fake_device = self._device
        if func is torch.Tensor.to:
            given = (*args[1:], *(kwargs or {}).values())
            units = [self._units[id(each)][1] for each in given if id(each) in self._units]
            if units:
                return self._recorder.bring(output, units[0])
        return output
