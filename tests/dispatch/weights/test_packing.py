"""One weight as small integers and back, held against torchao's own way back."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.dispatch.weights.packing import Packing, torchao_primitives
from bigmodel.errors import DispatchError
from bigmodel.profile.model.quantized import GROUP
from tests.examples import few
from tests.marks import needs

pytestmark = needs("torchao")
KINDS = ("int8", "int4")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def packed(weight: torch.Tensor, kind: str) -> tuple[Packing, torch.Tensor, Any]:
    packing = Packing.of(weight, kind)
    assert packing is not None
    into = torch.empty(packing.layout.nbytes, dtype=torch.uint8)
    return packing, into, packing.pack(weight, into)


def unpacked(packing: Packing, into: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    restored = torch.full_like(like, math.nan)
    packing.unpack(into, restored, torch.empty(packing.scratch_bytes, dtype=torch.uint8))
    return restored


def by_torchao(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The slow, obvious twin: quantise and dequantise with torchao alone."""
    ao, block = torchao_primitives(), (1, GROUP)
    groups = weight.float().reshape(-1, GROUP)
    mapping, dtype, low, high = (
        (ao.MappingType.ASYMMETRIC, torch.uint8, 0, 15)
        if kind == "int4"
        else (ao.MappingType.SYMMETRIC, torch.int8, -128, 127)
    )
    tiny = torch.finfo(torch.float32).tiny
    scale, zero = ao.choose_qparams_affine(groups, mapping, block, dtype, low, high, tiny, torch.float32, torch.int8)
    integers = ao.quantize_affine(groups, block, scale, zero, dtype, low, high)
    restored: torch.Tensor = ao.dequantize_affine(integers, block, scale, zero, dtype, low, high)
    return restored.reshape(weight.shape).to(weight.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=few(15))
@given(rows=st.integers(8, 24), seed=st.integers(0, 99), power=st.integers(-3, 3))
def test_unpacked_weights_are_those_of_torchao(kind: str, dtype: torch.dtype, rows: int, seed: int, power: int) -> None:
    weight = (torch.randn(rows, 2 * GROUP, generator=torch.manual_seed(seed)) * 10.0**power).to(dtype)
    packing, into, error = packed(weight, kind)
    restored = unpacked(packing, into, weight)
    assert torch.equal(restored, by_torchao(weight, kind))
    difference = restored.float() - weight.float()
    assert error.relative == pytest.approx(float(difference.norm() / weight.float().norm()), rel=1e-4)
    assert error.largest == float(difference.abs().max())


@pytest.mark.parametrize(("kind", "steps"), [("int8", 255), ("int4", 15)])
def test_no_element_is_off_by_more_than_half_a_step_of_its_group(kind: str, steps: int) -> None:
    weight = torch.randn(64, GROUP, generator=torch.manual_seed(0))
    packing, into, _ = packed(weight, kind)
    spread = 2 * weight.abs().amax(1) if kind == "int8" else weight.amax(1) - weight.amin(1)
    # A zero point is a whole number, too: it may cost the ends of the range another half.
    share = 0.5 if kind == "int8" else 1.0
    off = (unpacked(packing, into, weight) - weight).abs().amax(1)
    assert bool((off <= share * spread / steps * 1.001).all())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_unpacked_into_another_dtype_at_once(kind: str) -> None:
    weight = torch.randn(16, GROUP, generator=torch.manual_seed(0))
    packing, into, _ = packed(weight, kind)
    assert torch.equal(unpacked(packing, into, weight.bfloat16()), by_torchao(weight, kind).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_very_small_weights_come_back(kind: str) -> None:
    weight = torch.zeros(16, GROUP)
    packing, into, error = packed(weight, kind)
    assert torch.equal(unpacked(packing, into, weight), weight)
    assert error.relative == error.largest == 0.0
    small = torch.randn(16, GROUP, generator=torch.manual_seed(0)) * 1e-20
    assert packed(small, kind)[2].relative < 0.15


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_not_contiguous_is_taken_by_its_elements(kind: str) -> None:
    weight = torch.randn(2 * GROUP, 8, generator=torch.manual_seed(0)).t()
    packing, into, _ = packed(weight, kind)
    assert torch.equal(unpacked(packing, into, weight.contiguous()), by_torchao(weight, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_with_nan_or_infinity_are_refused_by_name(kind: str, value: float) -> None:
    weight = torch.ones(16, GROUP)
    weight[3, 5] = value
    packing = Packing.of(weight, kind)
    assert packing is not None
    with pytest.raises(DispatchError, match=r"layers\.3\.up\.weight"):
        packing.pack(weight, torch.empty(packing.layout.nbytes, dtype=torch.uint8), "layers.3.up.weight")


def test_vectors_and_small_weights_have_no_packing() -> None:
    assert Packing.of(torch.ones(4096), "int8") is None
    assert Packing.of(torch.ones(3, 5), "int4") is None
