"""A linear layer that holds its weight as a checkpoint stores it, and restores it in each forward.

Its output is bitwise that of `torch.nn.Linear` with the restored weight, unless it is `packed` for a kernel of the host
(`host_kernels`). No forward keeps the restored weight: the
backward, which only passes gradients on to the inputs, restores it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..sources.headers import TensorEntry
from .formats.format import Tensors, WeightFormat
from .host_kernels import HostKernel, HostProduct, PackedWeight, kernel_of
from .stored import StoredModule


class QuantizedLinear(StoredModule, nn.Linear):
    """Takes the place of a `torch.nn.Linear` on meta.

    Args:
        linear: the layer that it replaces; its bias is taken over.
        format: how the weight is stored.
        tensors: its tensors in the header by leaf.

    Attributes:
        format: as given.
        packed: what computes products on the host that need no gradient; None: the restored weight.
    """

    packed: HostProduct | None

    def __init__(self, linear: nn.Linear, format: WeightFormat, tensors: Mapping[str, TensorEntry]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format = format
        self.compute_dtype = linear.weight.dtype
        self.stored, self.packed = {}, None
        for leaf, entry in tensors.items():
            self.add_stored(leaf, entry.shape, entry.dtype)
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    def restored(self) -> torch.Tensor:
        """Return the weight, (out, in), in `compute_dtype`, on the device of the stored tensors."""
        return self.format.restore(self._tensors(), (self.out_features, self.in_features), self.compute_dtype)

    def kernel(self) -> HostKernel:
        """Return the kernel that can compute it on the host.

        Raises:
            ValueError: there is none; the message is a clause about its weight.
        """
        shape = self.out_features, self.in_features
        return kernel_of(self.format, shape, self.stored.values(), self.compute_dtype)

    def pack(self) -> PackedWeight:
        """Pack the weight for its kernel, from then on until `packed` is None; the stored tensors stay as they are."""
        found = self.kernel().pack(self.format, self._tensors())
        self.packed = found.of({name: getattr(self, name) for name in self.stored})
        return found

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wanted = input.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if not (torch.is_grad_enabled() and wanted):
            if self.packed is not None and self.packed.takes(input, self._parameters):
                return self.packed.product(input, self.bias)
            return F.linear(input, self.restored(), self.bias)
        tensors = self._tensors()
        shape = (self.out_features, self.in_features)
        output: torch.Tensor = _Restoring.apply(
            input, self.bias, (self.format, shape, self.compute_dtype, list(tensors)), *tensors.values()
        )
        return output

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {leaf: getattr(self, name) for name, leaf in self.stored.items()}

    def __getattr__(self, name: str) -> Any:
        # Code that reads the weight of a linear layer gets it restored, unless the format has a tensor of that name.
        if name == "weight" and "stored" in self.__dict__ and "weight" not in self.stored:
            return self.restored()
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format.label!r}"


class _Restoring(torch.autograd.Function):
    """forward(input, bias, (format, shape, dtype, leaves), *stored tensors) -> output"""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        how: tuple[WeightFormat, tuple[int, int], torch.dtype, list[str]],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.how, ctx.dtype = how, input.dtype
        return F.linear(input, _restored(how, tensors), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = gradient.matmul(_restored(ctx.how, ctx.saved_tensors).to(gradient.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_input, of_bias, None, *(None for _ in ctx.saved_tensors)


def _restored(
    how: tuple[WeightFormat, tuple[int, int], torch.dtype, list[str]], tensors: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    format, shape, dtype, leaves = how
    by_leaf: Tensors = dict(zip(leaves, tensors, strict=True))
    return format.restore(by_leaf, shape, dtype)
