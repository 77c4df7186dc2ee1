"""Gradients through experts that do not stay on the device between forward and backward.

As for streamed blocks, the forward saves only its inputs. The backward fetches the chosen experts again, recomputes the
layer with gradients enabled, and returns gradients of the host's fused tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from ...limits import GRADIENT_BYTES
from ...profile.training.recompute import gradients_of
from ..streaming.gradients import refuse_second_derivatives
from ..streaming.replay_state import Precision
from ..transfer.to_host import copied_to_host
from .layer import ExpertLayer, stand_in

Experts: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes a layer's output from hidden states, chosen experts and their weights."""


def wants_gradients(layer: ExpertLayer, *inputs: torch.Tensor) -> bool:
    """Whether autograd is enabled and `inputs` or the experts require a gradient."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in (*inputs, *(t.value for t in layer.fused.tensors)))


def differentiable(
    compute: Experts,
    module: nn.Module,
    layer: ExpertLayer,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gradient_bytes: int = GRADIENT_BYTES,
) -> torch.Tensor:
    """Compute `module` such that gradients flow to `hidden`, `weights` and the host's tensors.

    Args:
        compute: Computes it without gradients.
        module: The experts module.
        layer: Its experts on the host.
        hidden: (tokens, hidden size), on the device.
        index: (tokens, experts per token), the chosen experts.
        weights: (tokens, experts per token), the router's weights.
        gradient_bytes: Pinned memory through which gradients reach the host.
    """
    host = [tensor.value for tensor in layer.fused.tensors]
    output: torch.Tensor = _Visit.apply((compute, module, layer, gradient_bytes), hidden, index, weights, *host)
    return output


class _Visit(torch.autograd.Function):
    """forward((compute, module, layer, pinned bytes), hidden, index, weights, *host tensors) -> output"""

    @staticmethod
    def forward(ctx: Any, experts: tuple[Experts, nn.Module, ExpertLayer, int], *tensors: torch.Tensor) -> torch.Tensor:
        compute, ctx.module, ctx.layer, ctx.gradient_bytes = experts
        hidden, index, weights = tensors[:3]
        ctx.save_for_backward(hidden, index, weights)
        ctx.precision = Precision(hidden.device)
        return compute(hidden, index, weights)

    @staticmethod
    def backward(ctx: Any, *received: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives()
        layer: ExpertLayer = ctx.layer
        hidden, index, weights = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[1])
        weights = weights.detach().requires_grad_(ctx.needs_input_grad[3])
        chosen, numbers = torch.unique(index.cpu(), return_inverse=True)
        tensors = _copies(layer, chosen.tolist(), hidden.device)
        compute = stand_in(ctx.module, num_experts=len(chosen), **dict(zip(layer.names, tensors)))
        with torch.enable_grad(), ctx.precision.restored():
            output = compute(hidden, numbers.to(hidden.device), weights)
        found = gradients_of([output], received, [hidden, weights, *tensors])
        values = [tensor.value for tensor in layer.fused.tensors]
        moved = copied_to_host(found[2:], values, ctx.gradient_bytes)
        host = [None if each is None else _spread(each, chosen, value) for each, value in zip(moved, values)]
        return None, found[0], None, found[1], *host


def _copies(layer: ExpertLayer, chosen: list[int], device: torch.device) -> list[torch.Tensor]:
    """Return fused tensors of the chosen experts only, as leaves that require gradients like the host's tensors."""
    memory = torch.empty(len(chosen), layer.layout.nbytes, dtype=torch.uint8, device=device)
    for row, expert in enumerate(chosen):
        layer.block(expert).fetch(memory[row])
    leaves = [row.detach() for row in layer.rows(memory).values()]
    return [leaf.requires_grad_(t.value.requires_grad) for leaf, t in zip(leaves, layer.fused.tensors)]


def _spread(gradient: torch.Tensor, chosen: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the host's fused tensor, given that of the chosen experts; zero for all others."""
    whole = torch.zeros(host.shape, dtype=host.dtype, device=host.device)
    whole[chosen] = gradient
    return whole
