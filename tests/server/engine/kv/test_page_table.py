"""Which pages have frames: the ones that lose them, and where positions lie."""

from __future__ import annotations

import torch

from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK as B
from bigmodel.server.engine.kv.page_table import NONE, PageTable, Piece


def filled(pages: int, frames: int) -> PageTable:
    """A table whose frames all have whole pages, from page 0 on."""
    table = PageTable(pages, frames)
    for page in range(frames):
        table.give(page)
    table.fill(torch.arange(frames * B))
    return table


def test_the_page_read_the_longest_ago_is_the_oldest_and_of_those_the_first() -> None:
    table = filled(8, 4)
    table.read(torch.tensor([0, 1, 2, 3]))
    assert table.oldest([]) == [0, 1, 2, 3]
    table.read(torch.tensor([0, 1, 3]))
    assert table.oldest([]) == [2, 0, 1, 3]
    assert table.oldest([2, 1]) == [0, 3]


def test_pages_that_are_not_whole_come_last() -> None:
    table = PageTable(4, 2)
    table.give(0)
    table.give(1)
    table.fill(torch.arange(5, 2 * B))
    table.fill(torch.arange(2))
    assert table.is_whole(0) == table.is_whole(1) is True
    table.forget(0)
    table.give(0)
    table.fill(torch.arange(3))
    assert table.oldest([]) == [1, 0]


def test_a_page_that_is_forgotten_has_nothing_anywhere() -> None:
    table = filled(4, 2)
    table.write(1)
    table.take(1)
    table.write(0)
    assert (table.written, table.both, table.free) == ({0, 1}, {0}, 1)
    for page in (0, 1):
        table.forget(page)
    assert (table.written, table.both, table.free) == (set(), set(), 2)
    assert table.frame(0) == NONE
    assert not table.is_whole(0)


def test_positions_lie_together_where_their_frames_do() -> None:
    table = PageTable(5, 3)
    for page in (3, 0, 1):  # frames 0, 1, 2
        table.give(page)
    assert list(table.pieces(5, 4 * B + 1)) == [
        Piece(True, B + 5, 2 * B - 5),
        Piece(False, 2 * B, B),
        Piece(True, 0, B),
        Piece(False, 4 * B, 1),
    ]
    rows = torch.tensor([3, 3 * B + 1])
    assert table.in_frames(rows).tolist() == [B + 3, 1]
    assert table.held(torch.tensor([0, 2 * B])).tolist() == [True, False]
