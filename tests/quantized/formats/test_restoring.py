"""A dry run records one operation for a restored weight, with the memory that restoring takes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.quantized.formats import format as base
from bigmodel.quantized.formats.restoring import RESTORE

from ...accelerators import at, exact
from ..twins import LINEAR, Twin, mxfp4
from .test_formats import format_of

SHAPE = (64, 64)


class _Names(TorchDispatchMode):
    """The operations that run: their bytes, of new tensors, and of all that are read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []
        self.nbytes = self.moved = self.recorded = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        self.found.append(func)
        if func is RESTORE:
            self.recorded = args[2]
        elif func is torch.ops.aten.empty.memory_format:
            self.nbytes += output.nbytes
        elif not func.is_view:
            self.moved += sum(each.nbytes for each in tree_leaves((args, output)) if isinstance(each, torch.Tensor))
        return output


@pytest.mark.usefixtures("accelerators")
@exact
@pytest.mark.parametrize("chunk", [2**20, 2**11])
@pytest.mark.parametrize("twin", [*LINEAR, mxfp4()], ids=lambda twin: twin.name)
def test_one_operation_is_recorded_with_the_peak_of_restoring_and_the_bytes_it_moves(
    twin: Twin, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "CHUNK", chunk)
    torch.manual_seed(0)
    stored = twin.make(SHAPE)
    found = format_of(twin, stored, SHAPE)
    tensors = {leaf: tensor.to(at(0)) for leaf, tensor in stored.items()}
    gc.collect()
    before = memory_allocated(0)
    reset_peak_memory(0)
    with _Names() as real:
        out = found.restore(tensors, SHAPE, torch.bfloat16)
    peak = max_memory_allocated(0) - before
    with FakeTensorMode(), _Names() as names:
        fakes = {leaf: torch.empty(t.shape, dtype=t.dtype, device=at(0)) for leaf, t in tensors.items()}
        names.found.clear()
        names.nbytes = 0
        found.restore(fakes, SHAPE, torch.bfloat16)
    assert names.found.count(RESTORE) == 1
    assert len(names.found) == 3  # the weight, intermediate results, and restoring
    assert names.nbytes == peak
    assert names.recorded == real.moved
    assert out.shape == SHAPE
