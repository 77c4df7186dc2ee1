"""Operations that accelerators have and the CPU lacks, computed by the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


def _histc(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Count integers too."""
    if values.is_floating_point():
        return aten.histc.default(values, *args, **kwargs)
    return aten.histc.default(values.double(), *args, **kwargs).to(values.dtype)


def _in_float32(operation: OpOverload) -> Callable[..., Tensor]:
    """Return an operation that computes numbers of 16 bits in float32, for which the CPU has no kernel."""

    def computed(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if values.dtype not in (torch.bfloat16, torch.float16):
            return operation(values, *args, **kwargs)
        return operation(values.float(), *args, **kwargs).to(values.dtype)

    return computed


def _gates(from_input: Tensor, from_state: Tensor, input_bias: Tensor | None, state_bias: Tensor | None) -> Any:
    """Return the pre-activations of a recurrent cell from its input and from its state, biases added."""
    if input_bias is not None and state_bias is not None:
        return from_input + input_bias, from_state + state_bias
    return from_input, from_state


def _bias_gradient(gates: Tensor, has_bias: bool) -> Tensor | None:
    return gates.sum(0) if has_bias else None


def _lstm_cell(
    from_input: Tensor,
    from_state: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    state_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state, the cell and the activated gates (input, forget, new, output) of one step."""
    i, f, g, o = torch.add(*_gates(from_input, from_state, input_bias, state_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    following = f * cell + i * g
    return o * following.tanh(), following, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    state_gradient: Tensor | None,
    cell_gradient: Tensor | None,
    cell: Tensor,
    following: Tensor,
    gates: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the pre-activations, the cell and the bias."""
    i, f, g, o = gates.chunk(4, 1)
    squashed = following.tanh()
    d_state = torch.zeros_like(cell) if state_gradient is None else state_gradient
    d_cell = d_state * o * (1 - squashed * squashed)
    if cell_gradient is not None:
        d_cell = d_cell + cell_gradient
    parts = [
        d_cell * g * i * (1 - i),
        d_cell * cell * f * (1 - f),
        d_cell * i * (1 - g * g),
        d_state * squashed * o * (1 - o),
    ]
    d_gates = torch.cat(parts, 1)
    return d_gates, d_cell * f, _bias_gradient(d_gates, has_bias)


def _gru_cell(
    from_input: Tensor,
    from_state: Tensor,
    state: Tensor,
    input_bias: Tensor | None = None,
    state_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the state of one step, and what its backward needs: reset, update, new, the state, its new part."""
    mine, theirs = _gates(from_input, from_state, input_bias, state_bias)
    (ir, iz, i_n), (hr, hz, hn) = mine.chunk(3, 1), theirs.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (i_n + r * hn).tanh()
    return new + z * (state - new), torch.cat([r, z, new, state, hn], 1)


def _gru_cell_backward(gradient: Tensor, saved: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of both pre-activations, the state and both biases."""
    r, z, new, state, hn = saved.chunk(5, 1)
    d_new = gradient * (1 - z) * (1 - new * new)
    d_z = gradient * (state - new) * (1 - z) * z
    d_r = d_new * hn * (1 - r) * r
    d_input, d_state = torch.cat([d_r, d_z, d_new], 1), torch.cat([d_r, d_z, d_new * r], 1)
    return d_input, d_state, gradient * z, _bias_gradient(d_input, has_bias), _bias_gradient(d_state, has_bias)


_ANTIALIASED = (
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa.default,
    aten._upsample_bicubic2d_aa_backward.default,
)

KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten.histc.default: _histc,
    **{each: _in_float32(each) for each in _ANTIALIASED},
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    # Padded batches of nn.TransformerEncoder stay dense: there are no nested tensors here.
    aten._nested_tensor_from_mask_left_aligned.default: lambda values, mask: False,
}
