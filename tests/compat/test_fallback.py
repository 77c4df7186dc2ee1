"""Finding a part of a model that fits into what is left of a device."""

from __future__ import annotations

from torch import nn

from bigmodel.compat.fallback import fallback_allocate
from bigmodel.profile import compute_module_sizes


def test_a_part_is_taken_out_of_what_it_is_part_of() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), nn.Linear(8, 8))
    name, module, left = fallback_allocate(list(model.named_children()), compute_module_sizes(model), 100)
    assert (name, module) == ("0.1", model[0][1])
    assert [each for each, _ in left] == ["0.0", "1"]


def test_what_is_tied_to_a_part_that_was_too_large_already_is_no_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    modules, tied = list(model.named_children()), [["0.weight", "1.weight"]]
    assert fallback_allocate(modules, compute_module_sizes(model), 100, tied_parameters=tied) == (None, None, modules)


def test_classes_that_are_not_split_are_not_looked_into() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    modules = list(model.named_children())
    found, _, _ = fallback_allocate(modules, compute_module_sizes(model), 100, ["Sequential"])
    assert found is None
