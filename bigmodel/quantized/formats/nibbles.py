"""Integers and 4-bit floats out of packed bytes and words."""

from __future__ import annotations

import torch


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the unsigned integers in int32 words, along `dim`, the lowest bits first: uint8.

    Args:
        words: int32, (rows, columns).
        bits: bits of an integer: 2, 4 or 8.
        dim: the dimension along which integers share a word, 0 or 1.
    """
    along = words.transpose(0, 1) if dim == 0 else words
    octets = _octets(along)
    if bits < 8:
        mask = (1 << bits) - 1
        octets = torch.stack([(octets >> shift) & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)
    return octets.transpose(0, 1) if dim == 0 else octets


def unpack_dense(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return unsigned integers of any number of bits that are packed without gaps, also across words: uint8.

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


def float4(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of 4-bit floats (e2m1), one in each uint8: float16, exact.

    A code has a sign, two bits of exponent and one of mantissa. Moved to the ends of those of a float16, whose bias is
    larger by 14, it is the value divided by 2^14, subnormals too.
    """
    wide = codes.to(torch.int16)
    return (((wide & 8) << 12) | ((wide & 7) << 9)).view(torch.float16) * 2.0**14


def float4_pairs(octets: torch.Tensor) -> torch.Tensor:
    """Return the values of 4-bit floats, two in each uint8 along the last dimension, the low half first: float16."""
    return float4(torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2))
