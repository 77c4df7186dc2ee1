"""Operations that accelerate's own code is made of."""

from __future__ import annotations

import pickle

import pytest
import torch

from bigmodel.compat.operations import (
    TENSOR_INT_TO_DTYPE,
    ConvertOutputsToFp32,
    chained_operation,
    gather_tensor_shape,
    is_torch_xpu_tensor,
)
from bigmodel.train import DistributedOperationException
from tests.train.new_states import new_states as new_states


def test_the_shape_of_a_tensor_is_known_to_all() -> None:
    shape, number = gather_tensor_shape(torch.ones(3, 4).bfloat16())
    assert (shape.tolist(), TENSOR_INT_TO_DTYPE[number]) == ([[3], [4]], torch.bfloat16)


def test_a_forward_that_converts_is_not_pickled() -> None:
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        pickle.dumps(ConvertOutputsToFp32(abs))


def test_an_error_of_an_operation_names_those_it_is_part_of() -> None:
    @chained_operation
    def outer() -> None:
        raise DistributedOperationException("shapes differ")

    with pytest.raises(DistributedOperationException, match=r"outer failed: the error above") as raised:
        outer()
    assert "shapes differ" in str(raised.value.__cause__)


def test_a_tensor_of_the_host_is_not_of_an_intel_gpu() -> None:
    assert not is_torch_xpu_tensor(torch.ones(1))
