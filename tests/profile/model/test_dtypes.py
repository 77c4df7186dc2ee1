from __future__ import annotations

import pytest
import torch

from bigmodel.errors import PlanError
from bigmodel.profile.model.dtypes import (
    CustomDtype,
    dtype_byte_size,
    normalize_dtype,
    normalize_dtypes,
    planned_dtype,
    torch_dtype,
)


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


def test_weights_are_loaded_as_a_dtype_that_torch_has() -> None:
    assert torch_dtype("torch.float16") == torch_dtype(torch.float16) == torch.float16
    for dtype in ("int4", CustomDtype.FP8, "float99", "", None, 16):
        with pytest.raises(PlanError, match="dtype"):
            torch_dtype(dtype)  # type: ignore[arg-type]


def test_dtypes_by_name_are_a_mapping_of_names() -> None:
    assert normalize_dtypes(None) == {}
    assert normalize_dtypes({"lm_head.weight": "int4"}) == {"lm_head.weight": CustomDtype.INT4}
    for given in ("int4", {3: "int4"}, [("lm_head.weight", "int4")]):
        with pytest.raises(PlanError, match="special_dtypes"):
            normalize_dtypes(given)  # type: ignore[arg-type]
