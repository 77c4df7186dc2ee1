"""Products on the host with packed weights, beside those with restored ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bigmodel.quantized.formats.compressed_tensors import ScaledIntegers
from bigmodel.quantized.formats.format import WeightFormat
from bigmodel.quantized.host_kernels import MOST_INPUTS
from bigmodel.quantized.linear import QuantizedLinear
from bigmodel.quantized.packable import packable, packed_bytes
from bigmodel.sources.headers import TensorEntry

from .twins import Tensors, Twin, packed, plain

ROUNDING = 2.0**-9
"""Half a unit in the last place of bfloat16, relative to the number that is rounded."""


def int4(group: int = 32, symmetric: bool = True, bits: int = 4) -> tuple[Twin, WeightFormat]:
    return packed(bits, group, symmetric), ScaledIntegers(bits, False, True, "group", (1, group), symmetric)


def int8() -> tuple[Twin, WeightFormat]:
    return plain("int8"), ScaledIntegers(8, False, False, "channel", (1, 1), True)


def layer_of(
    stored: tuple[Twin, WeightFormat],
    shape: tuple[int, int] = (48, 256),
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **more: torch.Tensor,
) -> QuantizedLinear:
    twin, format = stored
    torch.manual_seed(0)
    tensors: Tensors = {**twin.make(shape), **more}
    linear = nn.Linear(shape[1], shape[0], bias=bias, dtype=dtype)
    entries = {leaf: TensorEntry(leaf, t.dtype, tuple(t.shape), 0, t.nbytes) for leaf, t in tensors.items()}
    layer = QuantizedLinear(linear, format, entries)
    for own, leaf in layer.stored.items():
        layer._parameters[own] = nn.Parameter(tensors[leaf], requires_grad=False)
    return layer


def inputs(*rows: int, width: int = 256) -> torch.Tensor:
    return torch.randn(*rows, width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "stored", [int4(32), int4(64), int4(128), int4(256), int8()], ids=["32", "64", "128", "256", "8"]
)
def test_a_packed_product_is_that_of_the_restored_weight_but_for_rounding(
    stored: tuple[Twin, WeightFormat], bias: bool
) -> None:
    layer = layer_of(stored, (208, 256), bias)
    weight = layer.restored().double()
    for rows in ((1,), (2, 5)):
        row = inputs(*rows)
        expected = F.linear(row.double(), weight)
        # The restored weight has been rounded, each element once; the kernel's sum and, beside a bias, the result are.
        magnitudes = F.linear(row.double().abs(), weight.abs())
        bound = ROUNDING * (1.01 * magnitudes + expected.abs())
        if layer.bias is not None:
            expected = expected + layer.bias.double()
            bound = bound + ROUNDING * expected.abs()
        with torch.no_grad():
            layer.pack()
            found = layer(row).double()
            layer.packed = None
        assert found.shape == expected.shape
        assert bool(((found - expected).abs() <= bound).all())


@pytest.mark.parametrize(
    ("shape", "rows", "joined"),
    [
        ((48, 2048), 1, 2),
        ((48, 2048), 2, 2),
        ((48, 2048), 3, 1),
        ((48, 1024), 1, 4),
        ((46, 1024), 1, 2),
        ((47, 1024), 1, 1),
        ((48, 4096), 1, 1),
    ],
)
def test_short_rows_of_int8_are_read_together(shape: tuple[int, int], rows: int, joined: int) -> None:
    layer = layer_of(int8(), shape)
    row = inputs(rows, width=shape[1])
    layer.pack()
    assert layer.kernel().joined(rows) == joined
    assert layer.packed is not None
    integers, scales = layer.packed.integers, layer.packed.scales
    sums = F.linear(row.double(), integers.double())
    with torch.no_grad():
        found = layer(row)
    once = (sums * scales.double()).to(torch.bfloat16)
    twice = sums.to(torch.bfloat16) * scales
    differing = found != (twice if joined > 1 else once)
    # The kernel sums in float32: a sum between two numbers of bfloat16 may be rounded to the other one.
    assert float(differing.float().mean()) < 0.02
    assert torch.allclose(found, once, rtol=2**-7)


@pytest.mark.parametrize("stored", [int4(), int8()], ids=["int4", "int8"])
def test_calls_of_many_rows_of_other_dtypes_and_for_gradients_restore_the_weight(
    stored: tuple[Twin, WeightFormat],
) -> None:
    layer = layer_of(stored)
    weight = layer.restored()
    layer.pack()
    most = MOST_INPUTS[layer.kernel().bits]
    with torch.no_grad():
        assert torch.equal(layer(inputs(most + 1)), F.linear(inputs(most + 1), weight))
        assert not torch.equal(layer(inputs(most)), F.linear(inputs(most), weight))
    row, other = inputs(3).requires_grad_(), inputs(3).requires_grad_()
    output = layer(row)
    assert torch.equal(output, F.linear(other, weight))
    for found, leaf in ((output, row), (F.linear(other, weight), other)):
        found.sum().backward()
        assert leaf.grad is not None
    assert torch.equal(row.grad, other.grad)  # type: ignore[arg-type]


def test_stored_tensors_that_were_written_to_or_replaced_are_computed_with() -> None:
    layer, row = layer_of(int4()), inputs(1)
    layer.pack()
    with torch.no_grad():
        layer.weight_scale.mul_(2)  # type: ignore[operator]
        assert torch.equal(layer(row), F.linear(row, layer.restored()))
        layer.pack()
        before = layer(row)
        layer.weight_scale = nn.Parameter(torch.zeros_like(layer.weight_scale), requires_grad=False)  # type: ignore[arg-type]
        assert bool(before.any())
        assert not bool(layer(row).any())
        layer.pack()
        layer.weight_scale.data = torch.ones_like(layer.weight_scale)  # type: ignore[arg-type]
        assert torch.equal(layer(row), F.linear(row, layer.restored()))


def test_no_rows_give_no_rows() -> None:
    layer = layer_of(int4())
    layer.pack()
    with torch.no_grad():
        assert layer(inputs(0)).shape == (0, 48)


def test_a_copy_of_a_packed_layer_restores_its_weight() -> None:
    layer, row = layer_of(int4()), inputs(1)
    layer.pack()
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(layer)(row), F.linear(row, layer.restored()))


@pytest.mark.parametrize("stored", [int4(32), int4(128), int8()], ids=["32", "128", "int8"])
def test_packed_bytes_are_those_of_the_tensors_computed_with(stored: tuple[Twin, WeightFormat]) -> None:
    layer = layer_of(stored)
    layer.pack()
    kept = [layer.packed.integers, layer.packed.scales]  # type: ignore[union-attr]
    others = [getattr(layer, own) for own, leaf in layer.stored.items() if leaf == "weight_shape"]
    assert sum(packed_bytes(layer).values()) == sum(tensor.nbytes for tensor in (*kept, *others))


REFUSED = [
    (
        int4(16),
        (48, 256),
        torch.bfloat16,
        {},
        "int4, groups of 16, and the host's kernels take int4 in groups of 32, 64",
    ),
    (int4(bits=3), (48, 256), torch.bfloat16, {}, "int3, groups of 32, and the host's kernels take int4"),
    (int4(symmetric=False), (64, 256), torch.bfloat16, {}, "without zero points"),
    (
        int4(),
        (48, 256),
        torch.bfloat16,
        {"weight_g_idx": torch.zeros(256, dtype=torch.int32)},
        "the host's kernels take",
    ),
    (int4(), (40, 256), torch.bfloat16, {}, "it has 40 rows, and the host's kernel for int4 takes multiples of 16"),
    (int8(), (48, 40), torch.bfloat16, {}, "its rows have 40 elements, and the host's kernel for int8 takes multiples"),
    (
        int4(),
        (48, 256),
        torch.float32,
        {},
        "the model computes in float32, and the host's kernels are fast in bfloat16",
    ),
]


@pytest.mark.parametrize(("stored", "shape", "dtype", "more", "reason"), REFUSED)
def test_a_weight_that_no_kernel_takes_is_not_packed_and_the_reason_is_one_clause(
    stored: tuple[Twin, WeightFormat],
    shape: tuple[int, int],
    dtype: torch.dtype,
    more: dict[str, torch.Tensor],
    reason: str,
) -> None:
    layer = layer_of(stored, shape, dtype=dtype, **more)
    with pytest.raises(ValueError, match=reason) as refused:
        layer.pack()
    assert "\n" not in str(refused.value)
    assert packable(layer) == {}


def test_a_layer_that_shares_a_stored_tensor_is_not_packed() -> None:
    one, other, third = layer_of(int4()), layer_of(int4()), layer_of(int4())
    other._parameters["weight_packed"] = one._parameters["weight_packed"]
    assert packable(nn.ModuleDict({"one": one, "other": other, "third": third})).keys() == {"third"}
