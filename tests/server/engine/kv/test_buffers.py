"""Key-value buffers keep what is written, within the reservation; the pool hands out no more than its capacity."""

from __future__ import annotations

import pytest
import torch

from bigmodel.server.engine.kv.buffers import GROWTH, SequenceKV, TokenPool, round_up


def test_round_up() -> None:
    assert [round_up(n) for n in (0, 1, GROWTH, GROWTH + 1)] == [0, GROWTH, GROWTH, 2 * GROWTH]


def test_growth_keeps_what_was_written() -> None:
    kv = SequenceKV()
    kv.reserve(4)
    first, second = torch.randn(2, 4, 3), torch.randn(2, 3, 3)
    kv.write(0, 0, first, first + 1)
    kv.reserve(8)
    kv.write(0, 4, second, second + 1)
    keys, values = kv.layer(0)
    assert torch.equal(keys[:, :7], torch.cat([first, second], dim=1))
    assert torch.equal(values[:, :7], torch.cat([first, second], dim=1) + 1)


def test_a_write_past_the_reservation_is_refused() -> None:
    kv = SequenceKV()
    kv.reserve(4)
    with pytest.raises(RuntimeError, match="position 5 is past the 4"):
        kv.write(0, 3, torch.zeros(1, 2, 1), torch.zeros(1, 2, 1))


def test_reservations_beyond_the_capacity_are_refused() -> None:
    pool = TokenPool(10)
    assert pool.take(6)
    assert not pool.take(5)
    assert pool.used == 6
    pool.give_back(6)
    assert pool.take(10)
    with pytest.raises(RuntimeError, match="11 positions given back, 10 held"):
        pool.give_back(11)
