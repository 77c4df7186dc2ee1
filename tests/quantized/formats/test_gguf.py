"""Each of ggml's types restores, bit for bit, what its description says, and what llama.cpp's Python package does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bigmodel.quantized.formats import format as base
from bigmodel.quantized.formats.gguf import Gguf, GgufScheme
from bigmodel.sources.headers import TensorEntry

from ..gguf_files import NUMBERS, random_blocks, values

BLOCKS = [name for name, (_, kind) in NUMBERS.items() if kind.dtype is None]
Block = list[int]
"""The bytes of one block."""


def half(block: Block, place: int) -> torch.Tensor:
    return torch.tensor(block[place : place + 2], dtype=torch.uint8).view(torch.float16).float()[0]


def signed(octet: int) -> int:
    return octet - 256 if octet > 127 else octet


def nibble(block: Block, start: int, element: int, run: int) -> int:
    """Each `run` bytes have the low halves of `run` elements, then their high halves."""
    group, place = divmod(element, 2 * run)
    octet = block[start + group * run + place % run]
    return octet & 15 if place < run else octet >> 4


def q8_0(block: Block, i: int) -> torch.Tensor:
    return half(block, 0) * signed(block[2 + i])


def q4_0(block: Block, i: int) -> torch.Tensor:
    return half(block, 0) * (nibble(block, 2, i, 16) - 8)


def q4_1(block: Block, i: int) -> torch.Tensor:
    return half(block, 0) * nibble(block, 4, i, 16) + half(block, 2)


def fifth(block: Block, start: int, element: int) -> int:
    return (int.from_bytes(bytes(block[start : start + 4]), "little") >> element & 1) * 16


def q5_0(block: Block, i: int) -> torch.Tensor:
    return half(block, 0) * (nibble(block, 6, i, 16) + fifth(block, 2, i) - 16)


def q5_1(block: Block, i: int) -> torch.Tensor:
    return half(block, 0) * (nibble(block, 8, i, 16) + fifth(block, 4, i)) + half(block, 2)


def k_scale(block: Block, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of the 32 elements that element i belongs to; as `get_scale_min_k4` of ggml."""
    group, packed = i // 32, block[4:16]
    if group < 4:
        scale, minimum = packed[group] & 63, packed[group + 4] & 63
    else:
        scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
        minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
    return half(block, 0) * scale, half(block, 2) * minimum


def q4_k(block: Block, i: int) -> torch.Tensor:
    scale, minimum = k_scale(block, i)
    return scale * nibble(block, 16, i, 32) - minimum


def q5_k(block: Block, i: int) -> torch.Tensor:
    scale, minimum = k_scale(block, i)
    high = block[16 + i % 32] >> (i // 32) & 1
    return scale * (nibble(block, 48, i, 32) + 16 * high) - minimum


def q6_k(block: Block, i: int) -> torch.Tensor:
    part, place = divmod(i, 128)
    high = block[128 + 32 * part + place % 32] >> (2 * (place // 32)) & 3
    return half(block, 208) * signed(block[192 + i // 16]) * (nibble(block, 0, i, 64) + 16 * high - 32)


def mxfp4(block: Block, i: int) -> torch.Tensor:
    code = nibble(block, 1, i, 16)
    value = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7] * (-1 if code & 8 else 1)
    return torch.tensor(value * 2.0 ** (block[0] - 127))


TWINS: dict[str, Callable[[Block, int], torch.Tensor]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "MXFP4": mxfp4,
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_restored_as_their_description_says(kind: str) -> None:
    torch.manual_seed(0)
    raw = random_blocks(kind, (2, 256))
    found = values(kind, raw, (2, 256)).flatten()
    size = NUMBERS[kind][1]
    blocks = raw.view(-1, size.nbytes).tolist()
    expected = torch.stack([TWINS[kind](block, i) for block in blocks for i in range(size.elements)])
    assert torch.equal(found, expected)
    assert found.std() > 0.001


@pytest.mark.parametrize("kind", BLOCKS)
def test_any_bytes_are_restored_as_by_llama_cpps_own_package(kind: str) -> None:
    quants = pytest.importorskip("gguf.quants", reason="needs the package gguf")
    numbers = pytest.importorskip("numpy", reason="needs numpy")
    constants = pytest.importorskip("gguf.constants", reason="needs the package gguf")
    number, size = NUMBERS[kind]
    raw = torch.randint(0, 256, (64, size.nbytes), dtype=torch.uint8)
    with numbers.errstate(all="ignore"):
        dequantised = quants.dequantize(raw.numpy(), constants.GGMLQuantizationType(number))
    expected, found = torch.from_numpy(dequantised.copy()), values(kind, raw, (64, size.elements))
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("kind", [*BLOCKS, "F16", "F32", "BF16"])
@pytest.mark.parametrize("heads", [None, 4])
def test_a_large_weight_is_restored_in_chunks_of_rows(
    kind: str, heads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, size = NUMBERS[kind]
    found = Gguf(size, heads)
    shape = (16, 256)
    raw = random_blocks(kind, shape) if size.dtype is None else torch.randn(shape).to(size.dtype)
    whole = found.restore({size.leaf: raw}, shape, torch.float32)
    monkeypatch.setattr(base, "CHUNK", 1)
    assert torch.equal(found.restore({size.leaf: raw}, shape, torch.float32), whole)


def test_rows_of_pairs_are_restored_as_halves_of_a_head() -> None:
    _, size = NUMBERS["F32"]
    stored = torch.arange(8.0)[:, None]
    restored = Gguf(size, heads=2).restore({size.leaf: stored}, (8, 1), torch.float32)
    assert restored.flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("kind", "heads", "shape", "problem"),
    [
        ("Q4_K", None, (4, 128), "rows of 128 elements are no multiple of the blocks of 256"),
        ("Q4_0", 3, (8, 32), "8 rows are no even number for each of 3 heads"),
        ("Q4_0", None, (4, 64), r"its weight_q4_0 has the shape \(4, 18\), not \(4, 36\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(kind: str, heads: int | None, shape: tuple[int, int], problem: str) -> None:
    _, size = NUMBERS[kind]
    entries = {size.leaf: TensorEntry("w", torch.uint8, (4, 18), 0, 72)}
    found = Gguf(size, heads).problem(shape, entries)
    assert found is not None
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(found)


def test_a_weight_in_two_types_is_refused() -> None:
    entry = TensorEntry("w", torch.uint8, (4, 18), 0, 72)
    with pytest.raises(ValueError, match="stored twice, as weight_q4_0 and weight_q8_0"):
        GgufScheme({}, False).format_of("w", {"weight_q4_0": entry, "weight_q8_0": entry})
