"""Each format restores, bit for bit, what its obvious twin reads."""

from __future__ import annotations

import pytest
import torch

from bigmodel.quantized.formats import format as base
from bigmodel.quantized.formats.format import WeightFormat
from bigmodel.quantized.recognise import read_scheme
from bigmodel.sources.headers import TensorEntry

from ..twins import LINEAR, Tensors, Twin, mxfp4

TWINS = [*LINEAR, mxfp4()]
SHAPE = (40, 64)


def entries(tensors: Tensors) -> dict[str, TensorEntry]:
    return {leaf: TensorEntry(leaf, t.dtype, tuple(t.shape), 0, t.nbytes) for leaf, t in tensors.items()}


def format_of(twin: Twin, tensors: Tensors, shape: tuple[int, int] = SHAPE) -> WeightFormat:
    scheme = read_scheme({"quantization_config": twin.config})
    assert scheme is not None
    found = scheme.format_of("w", entries(tensors), lambda entry: tensors[entry.name])
    assert found.problem(shape, entries(tensors)) is None
    return found


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_a_restored_weight_is_what_the_twin_reads(twin: Twin) -> None:
    torch.manual_seed(0)
    tensors = twin.make(SHAPE)
    found = format_of(twin, tensors)
    expected = twin.restore(tensors, SHAPE)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert torch.equal(found.restore(tensors, SHAPE, dtype), expected.to(dtype))
    assert found.label == twin.label
    assert expected.float().std() > 0.005


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_a_large_weight_is_restored_in_chunks_of_rows(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    tensors = twin.make(SHAPE)
    found = format_of(twin, tensors)
    whole = found.restore(tensors, SHAPE, torch.float32)
    monkeypatch.setattr(base, "CHUNK", 1)
    assert torch.equal(found.restore(tensors, SHAPE, torch.float32), whole)
