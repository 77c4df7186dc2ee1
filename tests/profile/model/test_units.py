from __future__ import annotations

from torch import nn

from bigmodel.profile import profile_units

from ..models import Flat, Stack


def test_bytes_of_units_add_up_to_the_model() -> None:
    units = {unit.name: unit for unit in profile_units(Flat())}
    assert units["batchnorm"].weights == 32
    assert units["batchnorm"].buffers == 40
    assert sum(unit.nbytes for unit in units.values()) == 236


def test_a_unit_counts_what_is_tied_inside_it_once() -> None:
    block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    block[1].weight = block[0].weight
    (unit,) = profile_units(nn.ModuleList([block]), no_split_module_classes=["Sequential"])
    assert unit.weights == 64
    assert len(unit.tensors) == 2


def test_a_slab_aligns_every_tensor_and_leaves_buffers_out_unless_asked() -> None:
    unit = {unit.name: unit for unit in profile_units(Flat())}["batchnorm"]
    assert unit.slab() == 2 * 512
    assert unit.slab(with_buffers=True) == 5 * 512


def test_dtype_applies_to_the_units() -> None:
    narrow, wide = profile_units(Stack(), "float16"), profile_units(Stack())
    assert [2 * unit.nbytes for unit in narrow] == [unit.nbytes for unit in wide]
