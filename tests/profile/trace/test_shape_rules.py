"""Rules for shapes give what PyTorch's fake kernels give."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bigmodel.profile.trace.fake_kernels import by_pytorch, derive, fake_mode
from bigmodel.profile.trace.shape_rules import RULES

from ...examples import alike, some

aten = torch.ops.aten

SHAPES = [(5,), (1,), (2, 1, 5), (1, 3, 1), (2, 3, 5), (2, 3, 1), (4, 1, 3, 5), (), (0, 5)]
DTYPES = [torch.bfloat16, torch.float32, torch.int16, torch.int64, torch.bool]

TWO = [aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor]
ONE = [
    aten.neg.default, aten.cos.default, aten.rsqrt.default, aten.sigmoid.default, aten.silu.default, aten.sin.default,
    aten.alias.default, aten.detach.default,
]  # fmt: skip
IN_PLACE = [aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.bitwise_or_.Tensor]
WITH_NUMBER: list[tuple[Any, Any]] = [
    *itertools.product([aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor, aten.mul.Scalar], [2, 0.5]),
    *itertools.product([aten.mul_.Tensor, aten.pow.Tensor_Scalar], [2, 0.5]),
    (aten.bitwise_and_.Scalar, 0),
    (aten.bitwise_left_shift_.Tensor_Scalar, 0),
    (aten._safe_softmax.default, 0),
]


def described(run: Any, func: Any, args: tuple[Any, ...]) -> Any:
    """Return what a result is: its place in memory, and the argument that it shares or is; or the type of an error."""
    try:
        found = run(func, args, {})
    except Exception as error:  # PyTorch's own, of operations that are refused
        return type(error)
    storages = [each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)]
    storage = found.untyped_storage()
    shared = storages.index(storage._cdata) if storage._cdata in storages else None
    same = [found is each for each in args]
    place = found.shape, found.stride(), found.storage_offset(), storage.nbytes()
    return *place, found.dtype, found.device, found.requires_grad, shared, same


def has_rule(func: Any, *args: Any) -> bool:
    """Compare a result with and without rules, and return whether there is one for it."""
    assert described(derive, func, args) == described(by_pytorch, func, args), (func, args)
    return RULES[func](args) is not None


def tensors(layouts: list[Any]) -> list[torch.Tensor]:
    with fake_mode():
        return [torch.empty(shape, dtype=dtype) for shape, dtype in layouts]


LAYOUTS = list(itertools.product(SHAPES, DTYPES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "func",
    [
        TWO[0],
        *(pytest.param(func, marks=pytest.mark.long) for func in [*TWO[1:], *IN_PLACE[:2]]),
        *some(IN_PLACE[2:], first=0),
    ],
    ids=str,
)
def test_results_of_two_tensors(func: Any) -> None:
    """All shapes meet, of a few dtypes, and all dtypes, of tensors with dimensions and without."""
    found = tensors(LAYOUTS)
    few = [each for each in found if each.dim() == 0 or each.shape == (5,)]
    pairs = [(left, right) for left in few for right in few]
    for one, other in ((torch.float32, torch.float32), (torch.int64, torch.int64)):
        pairs += [(left, right) for left in found for right in found if (left.dtype, right.dtype) == (one, other)]
    assert sum(has_rule(func, left, right) for left, right in pairs) > 20


@pytest.mark.parametrize("func", ONE, ids=str)
def test_results_of_one_tensor(func: Any) -> None:
    assert sum(has_rule(func, each) for each in tensors(LAYOUTS))


@alike(("func", "number"), WITH_NUMBER, first=-1, ids=str)
def test_results_with_a_number(func: Any, number: float) -> None:
    assert sum(has_rule(func, each, number) for each in tensors(LAYOUTS))


@pytest.mark.parametrize("func", [aten.view.default, aten._unsafe_view.default], ids=str)
def test_views_in_other_shapes(func: Any) -> None:
    (found,) = tensors([((2, 3, 4), torch.float32)])
    sizes = [[24], [-1], [6, -1], [2, 12], [4, 3, 2], [2, 3, 4, 1], [5, -1], [-1, -1], [7], [0, -1]]
    assert [has_rule(func, found, size) for size in sizes] == [True] * 6 + [False] * 4
    with fake_mode():
        part = torch.empty(4, 3, 4)[1:3]
    assert has_rule(func, part, [6, 4])


def test_tensors_with_other_strides_have_no_rule() -> None:
    (found,) = tensors([((2, 3, 4), torch.float32)])
    with fake_mode():
        odd = [found.transpose(0, 1), found[:, :2], found.expand(2, 3, 4)[..., ::2]]
    assert not any(has_rule(aten.neg.default, each) for each in odd)
    assert not any(has_rule(aten.detach.default, each) for each in odd)


def test_tensors_of_two_devices_have_no_rule() -> None:
    with fake_mode():
        here, there = torch.empty(4), torch.empty(4, device="meta")
    assert not has_rule(aten.add.Tensor, here, there)
