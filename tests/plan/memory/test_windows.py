from __future__ import annotations

from bigmodel.limits import READ_AHEAD_BYTES, STAGING_BYTES
from bigmodel.plan import read_ahead_window, staging


def test_it_holds_the_largest_block_and_the_beginning_of_the_next() -> None:
    assert read_ahead_window([3 * READ_AHEAD_BYTES, 4 * READ_AHEAD_BYTES, 3 * READ_AHEAD_BYTES]) == 5 * READ_AHEAD_BYTES


def test_of_small_blocks_it_holds_two() -> None:
    assert read_ahead_window([10, 30, 20]) == 60
    assert read_ahead_window([10, 30, 20, 30]) == 60


def test_it_is_never_larger_than_what_passes_through_it() -> None:
    assert read_ahead_window([30, 20]) == 50
    assert read_ahead_window([]) == 0


def test_what_is_staged_is_two_blocks_at_most() -> None:
    assert staging([]) == 0
    assert staging([10, 30]) == 40
    assert staging([10, 30, 30]) == 60
    assert staging([STAGING_BYTES, STAGING_BYTES]) == STAGING_BYTES
