"""What operations do with the memory of their arguments."""

from __future__ import annotations

import torch

from bigmodel.devices.virtual.roles import roles_of, rows_read, tensors_in

aten = torch.ops.aten


def test_views_and_new_memory_are_no_access() -> None:
    assert roles_of(aten.view.default) is None
    assert roles_of(aten.detach.default) is None
    assert roles_of(aten.empty_strided.default) is None


def test_what_is_written_is_known_by_position_and_by_name() -> None:
    in_place, out = roles_of(aten.add_.Tensor), roles_of(aten.add.out)
    assert in_place is not None
    assert out is not None
    assert (in_place.positions, in_place.reads) == ({0}, True)
    assert (out.positions, out.names) == (set(), {"out"})


def test_shapes_are_taken_from_tensors_that_are_not_read() -> None:
    like = roles_of(aten.zeros_like.default)
    assert like is not None
    assert not like.reads


def test_rows_of_a_gather_are_those_of_its_indices() -> None:
    table = torch.zeros(5, 2)
    assert rows_read(aten.index.Tensor, (table, [torch.tensor([3, 1, 3])])) == [1, 3]
    assert rows_read(aten.index.Tensor, (table, [torch.tensor([True, False, True, False, True])])) is None
    assert rows_read(aten.index_select.default, (table, 0, torch.tensor([4]))) == [4]
    assert rows_read(aten.index_select.default, (table, 1, torch.tensor([1]))) is None
    assert rows_read(aten.add.Tensor, (table, table)) is None


def test_tensors_are_found_alone_and_in_lists() -> None:
    one = torch.zeros(1)
    assert [list(tensors_in(value)) for value in (one, [one, 2, None], 3)] == [[one], [one], []]
