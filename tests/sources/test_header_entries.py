from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.errors import CheckpointFormatError
from bigmodel.sources.header_entries import DTYPES, TensorEntry, parse_entry, refuse


def entry(**changes: Any) -> TensorEntry:
    value = {"dtype": "F16", "shape": [3, 2], "data_offsets": [4, 16]} | changes
    return parse_entry("w", value, data_start=100, data_size=20, source="file")


def test_an_entry_says_where_in_the_file_the_tensor_lies() -> None:
    assert entry() == TensorEntry("w", torch.float16, (3, 2), offset=104, nbytes=12)
    assert entry(shape=[], data_offsets=[18, 20]) == TensorEntry("w", torch.float16, (), 118, 2)
    assert entry(shape=[7, 0], data_offsets=[20, 20]) == TensorEntry("w", torch.float16, (7, 0), 120, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "F128"}, "file: tensor 'w' has the dtype 'F128', which is not one of BOOL, U8"),
        ({"shape": [-1, -6]}, "whole numbers from 0"),
        ({"shape": [2**40, 2**40]}, "more elements than can be addressed"),
        ({"data_offsets": [10, 22]}, "out of range"),
        ({"data_offsets": [4, 15]}, r"12 bytes, but its data_offsets \[4, 15\] hold 11"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointFormatError, match=message):
        entry(**changes)


def test_a_refusal_names_the_file_first() -> None:
    with pytest.raises(CheckpointFormatError, match=r"^file: is odd$"):
        refuse("file", "is odd")


def test_no_two_names_mean_one_dtype() -> None:
    assert len(set(DTYPES.values())) == len(DTYPES)
