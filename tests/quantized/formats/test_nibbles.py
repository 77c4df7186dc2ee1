"""Small floats are restored by moving bits: each code has the value of a table, or of PyTorch's cast."""

from __future__ import annotations

import pytest
import torch

from bigmodel.quantized.formats.nibbles import cast, float4_pairs, float8, nibbles, power_of_two, unpack_words

from ..twins import E2M1

OCTETS = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether bits are equal; NaN are equal to each other."""
    nan = expected.isnan()
    return bool((found.isnan() == nan).all()) and torch.equal(
        found[~nan].view(torch.int32), expected[~nan].view(torch.int32)
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_8_bit_float_is_what_pytorch_casts_it_to(dtype: torch.dtype) -> None:
    assert same(float8(OCTETS.view(dtype)), OCTETS.view(dtype).to(torch.float32))


def test_every_byte_of_4_bit_floats_is_two_values_of_the_table() -> None:
    expected = [[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)]
    assert same(float4_pairs(OCTETS.view(16, 16)), torch.tensor(expected).view(16, 32))


def test_every_byte_of_4_bit_integers_is_two_of_them() -> None:
    expected = [[byte & 15, byte >> 4] for byte in range(256)]
    assert torch.equal(nibbles(OCTETS.view(2, 128)), torch.tensor(expected, dtype=torch.int16).view(2, 256))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_integers_share_words_along_either_dimension(bits: int, dim: int) -> None:
    torch.manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (3, 5), dtype=torch.int32)
    along = words.T if dim == 0 else words
    rows = [
        [(word & 0xFFFFFFFF) >> at & (1 << bits) - 1 for word in row for at in range(0, 32, bits)]
        for row in along.tolist()
    ]
    expected = torch.tensor(rows)
    assert torch.equal(unpack_words(words, bits, dim).long(), expected.T if dim == 0 else expected)


def test_powers_of_two_reach_from_the_smallest_to_infinity() -> None:
    expected = torch.tensor([2.0 ** (byte - 127) if byte < 255 else float("inf") for byte in range(256)])
    assert same(power_of_two(OCTETS), expected)


def test_a_cast_of_float16_to_bfloat16_rounds_as_pytorch_does() -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert same(cast(values, torch.bfloat16).float(), values.to(torch.bfloat16).float())
