"""Key-value buffers: what is written is read, growth keeps it, nothing is written past what was reserved."""

from __future__ import annotations

import pytest
import torch

from bigmodel.server.engine.cache import GROWTH, RaggedCache, SequenceKV, Span, round_up


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


def test_a_packed_step_is_shared_out_to_its_sequences() -> None:
    a, b = SequenceKV(), SequenceKV()
    a.reserve(8)
    b.reserve(8)
    a.write(0, 0, torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    cache = RaggedCache([Span(a, 0, 3, 4, 2), Span(b, 1, 0, 3, 3)])
    packed = torch.randn(1, 2, 5, 4)  # one row of padding at the end
    cache.update(packed, packed * 2, 0)
    assert torch.equal(a.layer(0)[0][:, 3:4], packed[0, :, 0:1])
    assert torch.equal(b.layer(0)[1][:, :3], packed[0, :, 1:4] * 2)
    assert [(p.row, p.start, p.end) for p in cache.pieces] == [(0, 3, 4), (1, 0, 3)]
