"""Integers and small floats out of packed bytes and words.

Everything is arithmetic on whole tensors: a nibble is spread, and the bits of a small float are moved to their places
in a wider one, with operations on words that hold several elements. Nothing waits for values.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch

from ...devices import HOST, virtual

MEASURED_FOR: ContextVar[torch.device | None] = ContextVar("restoring_measured_for", default=None)
"""The device that restoring is measured for, on meta tensors; None: tensors lie on the device that counts."""

_SPREAD = 1 + (1 << 12)
"""Multiplied with a byte: its low half at bit 0 and its high half at bit 16, each below other bits."""

_HALVES = 0x000F000F


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the unsigned integers in int32 words, along `dim`, the lowest bits first: uint8 or int16.

    Args:
        words: int32, (rows, columns).
        bits: bits of an integer: 2, 4 or 8.
        dim: the dimension along which integers share a word, 0 or 1.
    """
    if dim == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
        integers = words.unsqueeze(1).bitwise_right_shift(shifts.unsqueeze(1)).bitwise_and_((1 << bits) - 1)
        return integers.to(torch.int16).flatten(0, 1)
    octets = _octets(words)
    if bits == 4:
        return nibbles(octets)
    if bits == 2:
        octets = torch.stack([(octets >> shift) & 3 for shift in range(0, 8, 2)], dim=-1).flatten(-2)
    return octets


def unpack_dense(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return unsigned integers of any number of bits that are packed without gaps, also across words: uint8 or int16.

    Args:
        words: int32, (rows, ceil(count * bits / 32)).
        bits: bits of an integer, at most 8.
        count: integers in a row.
    """
    if bits in (2, 4, 8):
        return unpack_words(words, bits, dim=1)[:, :count]
    octets = torch.nn.functional.pad(_octets(words), (0, 1)).to(torch.int16)
    position = torch.arange(count, device=words.device) * bits
    pair = octets[:, position // 8] | (octets[:, position // 8 + 1] << 8)
    return ((pair >> (position % 8).to(torch.int16)) & ((1 << bits) - 1)).to(torch.uint8)


def _octets(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each row of words: uint8, (rows, 4 * columns)."""
    return words.contiguous().reshape(-1).view(torch.uint8).view(words.shape[0], -1)


def nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Return 4-bit integers, two in each uint8 along the last dimension, the low half first: int16."""
    return _spread(octets).view(torch.int16)


def float4_pairs(octets: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of 4-bit floats (e2m1), two in each uint8 along the last dimension, the low half first.

    A code has a sign, two bits of exponent and one of mantissa. Moved to the ends of those of a float16, whose bias is
    larger by 14, it is the value divided by 2^14, subnormals too. Shifted by 9, the sign is at bit 12; adding 0x7000
    carries it to bit 15, and what the addition leaves below is masked.
    """
    words = _spread(octets).mul_(1 << 9).add_(0x70007000).bitwise_and_(_signed(0x8E008E00))
    return words.view(torch.float16).to(torch.float32).mul_(2.0**14)


def float8(values: torch.Tensor) -> torch.Tensor:
    """Return the values of 8-bit floats (e4m3fn, e5m2): float32.

    PyTorch casts these on the host one by one, an accelerator in one kernel. An e5m2 is the upper half of a float16.
    The exponent of an e4m3fn has one bit less, and a bias less by 8: in the place of a float16's it is the value
    divided by 2^8, subnormals too. Only NaN, all ones, is no such value: adding one carries to bit 14, the highest of
    the exponent.
    """
    device = MEASURED_FOR.get() or values.device
    if device.type not in (HOST, virtual.TYPE):
        return values.to(torch.float32)
    wide = values.view(torch.int8).to(torch.int16)
    if values.dtype == torch.float8_e5m2:
        return wide.bitwise_left_shift_(8).view(torch.float16).to(torch.float32)
    wide.bitwise_left_shift_(7).bitwise_and_(_signed(0xBFFF, 16))
    wide.bitwise_or_((wide + (1 << 7)).bitwise_and_(1 << 14))
    return wide.view(torch.float16).to(torch.float32).mul_(2.0**8)


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in a dtype. PyTorch casts float16 to bfloat16 on the host one by one, but not over float32."""
    return (values.to(torch.float32) if values.dtype != dtype else values).to(dtype)


def power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """Return two to the power of uint8 numbers less 127: float32; of 255, which stands for NaN, infinity."""
    exponent = biased.to(torch.int32)
    subnormal = exponent.eq(0).to(torch.int32).bitwise_left_shift_(22)
    return exponent.bitwise_left_shift_(23).bitwise_or_(subnormal).view(torch.float32)


def _spread(octets: torch.Tensor) -> torch.Tensor:
    """Return int32 words, each with the low half of a byte in its lower 16 bits and the high half in its upper 16."""
    return octets.to(torch.int32).mul_(_SPREAD).bitwise_and_(_HALVES)


def _signed(bits: int, width: int = 32) -> int:
    """Return the integer of `width` bits with a sign that has these bits."""
    return bits - (1 << width) if bits >> (width - 1) else bits
