from __future__ import annotations

import pytest
import torch

from bigmodel.errors import PlanError
from bigmodel.profile.dtypes import CustomDtype, dtype_byte_size, normalize_dtype, planned_dtype


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("float16", torch.float16),
        ("torch.bfloat16", torch.bfloat16),
        (torch.int8, torch.int8),
        ("int4", CustomDtype.INT4),
        (CustomDtype.FP8, CustomDtype.FP8),
    ],
)
def test_names_and_dtypes_mean_the_same(given: object, meant: object) -> None:
    assert normalize_dtype(given) is meant


@pytest.mark.parametrize("name", ["float17", "nn", "Tensor"])
def test_a_name_that_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=name):
        normalize_dtype(name)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float64", 8), ("float32", 4), ("bfloat16", 2), ("fp8", 1), ("bool", 1), ("int4", 0.5), ("int2", 0.25)],
)
def test_byte_sizes(dtype: str, size: float) -> None:
    assert dtype_byte_size(dtype) == size


def test_only_floating_point_tensors_are_cast() -> None:
    assert planned_dtype(torch.float32, torch.float16) == torch.float16
    assert planned_dtype(torch.int64, torch.float16) == torch.int64
    assert planned_dtype(torch.float32, None) == torch.float32
