"""Operations on some of the tokens that they were recorded on."""

from __future__ import annotations

import pytest

from bigmodel.profile.share import for_share_of_tokens
from bigmodel.profile.work import ATTENTION, CALL, CONVOLUTION, MOVE, PRODUCT, Work

WORK = Work(PRODUCT, elements=1000, rows=64, nbytes=400)


@pytest.mark.parametrize("kind", [PRODUCT, CONVOLUTION])
def test_matrices_stay_and_rows_are_fewer(kind: str) -> None:
    found = for_share_of_tokens(Work(kind, elements=1000, rows=64), 0.25)
    assert (found.elements, found.rows) == (1000, 16)


def test_keys_and_values_are_fewer_too() -> None:
    found = for_share_of_tokens(Work(ATTENTION, elements=1000, rows=64, nbytes=400), 0.25)
    assert (found.elements, found.rows, found.nbytes) == (250, 16, 100)


def test_fewer_bytes_are_moved_and_a_call_is_a_call() -> None:
    assert for_share_of_tokens(Work(MOVE, nbytes=400), 0.25).nbytes == 100
    assert for_share_of_tokens(Work(CALL), 0.25) == Work(CALL)


def test_there_is_one_row_at_least_and_all_of_it_is_all() -> None:
    assert for_share_of_tokens(WORK, 1e-6).rows == 1
    assert for_share_of_tokens(WORK, 1.0) == WORK
