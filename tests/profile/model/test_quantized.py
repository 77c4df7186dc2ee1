"""Bytes of quantised weights, without any weight."""

import pytest

from bigmodel.profile.model.quantized import GROUP, quantized_bytes, quantized_parts


def test_a_matrix_takes_a_byte_or_half_of_one_for_each_element_and_five_for_each_group() -> None:
    elements, groups = 4096 * 4096, 4096 * 4096 // GROUP
    assert quantized_bytes((4096, 4096), "float32", "int8") == elements + 4 * groups
    assert quantized_bytes((4096, 4096), "bfloat16", "int4") == elements // 2 + 5 * groups


def test_without_an_offload_dtype_bytes_are_unchanged() -> None:
    assert quantized_bytes((4096, 4096), "bfloat16", None) == 2 * 4096 * 4096


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4096,), "float32"),  # a norm or a bias
        ((3, 5), "float32"),  # no whole number of groups
        ((0, GROUP), "float32"),
        ((64, GROUP), "int64"),
        ((64, GROUP), "float64"),
        ((1, GROUP), "bfloat16"),  # each part begins at a multiple of 512 bytes: more than it takes as it is
    ],
)
def test_tensors_that_cannot_be_quantised_or_would_not_shrink_are_unchanged(shape: tuple[int, ...], dtype: str) -> None:
    assert quantized_parts(shape, dtype, "int8") is None
    assert quantized_bytes(shape, dtype, "int8") == quantized_bytes(shape, dtype, None)
