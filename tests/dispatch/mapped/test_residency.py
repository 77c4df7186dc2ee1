"""What stays in memory and what takes turns, decided without any thread."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bigmodel.dispatch.mapped import residency
from bigmodel.dispatch.mapped.mapped_block import MappedBlock
from bigmodel.dispatch.mapped.residency import MARGIN, Residency, spread_order
from bigmodel.dispatch.weights.visits import StreamStats

from ..mapped_files import mapped_blocks

MIB = 2**20


@pytest.fixture
def blocks(tmp_path: Path) -> list[MappedBlock]:
    """Six blocks of a MiB."""
    return mapped_blocks(tmp_path, 6)[0]


def within(blocks: list[MappedBlock], budget: int, monkeypatch: pytest.MonkeyPatch) -> Residency:
    """Return what decides for a process that is made of nothing but blocks."""
    monkeypatch.setattr(residency, "resident_bytes", lambda: sum(block.paged_in for block in blocks))
    found = Residency(blocks, int(budget / (1 - MARGIN)) + 1, StreamStats())
    found.order = list(blocks)
    return found


def page_in_all(decides: Residency, waited_for: list[MappedBlock], may_drop: bool = True) -> list[MappedBlock]:
    """Do as it says until it says no more; return the blocks that came in."""
    came: list[MappedBlock] = []
    decides.measure()
    while (found := decides.next_step([b for b in waited_for if not b.is_ready], may_drop)) is not None:
        block, step = found
        block.paged_in += step.nbytes
        came.append(block)
    return came


def test_blocks_waited_for_come_first_and_then_those_expected_next(
    blocks: list[MappedBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    decides = within(blocks, 6 * MIB, monkeypatch)
    assert page_in_all(decides, [blocks[4]]) == [blocks[4], *blocks[:4], blocks[5]]


def test_without_room_the_rest_waits(blocks: list[MappedBlock], monkeypatch: pytest.MonkeyPatch) -> None:
    decides = within(blocks, 3 * MIB, monkeypatch)
    assert page_in_all(decides, [], may_drop=False) == blocks[:3]


def test_for_what_is_wanted_soon_goes_what_is_wanted_last(
    blocks: list[MappedBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    decides = within(blocks, 3 * MIB, monkeypatch)
    page_in_all(decides, [])
    decides.order = [*blocks[2:], *blocks[:2]]
    assert page_in_all(decides, [blocks[2]])[0] is blocks[3]
    assert not blocks[1].paged_in, "used last, it is wanted again last"
    assert blocks[0].paged_in


def test_resident_blocks_are_spread_between_those_that_take_turns(
    blocks: list[MappedBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks' room goes to what is computed with and what comes in beside it; of six the other two stay."""
    decides = within(blocks, 4 * MIB, monkeypatch)
    came: list[MappedBlock] = []
    for turn in range(18):
        block = blocks[turn % 6]
        decides.order = [*blocks[turn % 6 :], *blocks[: turn % 6]]
        block.users = 1
        paged_in = page_in_all(decides, [block])
        block.users = 0
        came += paged_in if turn >= 6 else []
        assert sum(each.paged_in for each in blocks) <= 4 * MIB
    assert sorted(block.name for block in came) == ["1", "1", "2", "2", "3", "3", "5", "5"]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 22, 61])
def test_the_beginning_of_the_order_is_spread_evenly(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    for first in range(1, count + 1):
        places = [*sorted(order[:first]), count + min(order[:first])]
        longest = max(later - place for place, later in pairwise(places))
        assert longest <= 4 * count / first


def test_blocks_in_use_are_never_dropped(blocks: list[MappedBlock], monkeypatch: pytest.MonkeyPatch) -> None:
    decides = within(blocks, 2 * MIB, monkeypatch)
    page_in_all(decides, [])
    for block in blocks[:2]:
        block.users = 1
    decides.order = [*blocks[2:], *blocks[:2]]
    came = page_in_all(decides, [blocks[2]])
    assert came == [blocks[2]], "room or no room, for a forward waits for it"
    assert all(block.paged_in for block in blocks[:3])


def test_with_no_budget_all_comes_in(blocks: list[MappedBlock], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "page_cache_bytes", lambda used: 2**40)
    decides = Residency(blocks, None, StreamStats())
    decides.order = list(blocks)
    assert page_in_all(decides, []) == blocks


def dropped_in_two_passes(decides: Residency, blocks: list[MappedBlock], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Compute with all blocks in turn, twice; return the names of those that were evicted from the page cache."""
    evicted: set[str] = set()

    def drop(self: MappedBlock, nbytes: int | None = None, evict: bool = False) -> int:
        self.forget()
        if evict:
            evicted.add(self.name)
        return 0

    monkeypatch.setattr(MappedBlock, "drop", drop)
    for turn in range(2 * len(blocks)):
        place = turn % len(blocks)
        decides.order = [*blocks[place:], *blocks[:place]]
        blocks[place].users = 1
        page_in_all(decides, [blocks[place]])
        blocks[place].users = 0
    return evicted


def test_without_a_budget_blocks_that_alternate_are_evicted_when_they_are_dropped(
    blocks: list[MappedBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "page_cache_bytes", lambda used: 4 * MIB)
    decides = Residency(blocks, None, StreamStats())
    assert dropped_in_two_passes(decides, blocks, monkeypatch) == {"1", "2", "3", "5"}


@pytest.mark.parametrize(("free", "evicted"), [(6, set()), (4, {"1", "2", "3", "5"}), (5, {"1", "3", "5"})])
def test_under_a_budget_the_page_cache_keeps_what_it_has_memory_for(
    blocks: list[MappedBlock], free: int, evicted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "page_cache_bytes", lambda used: free * MIB)
    decides = within(blocks, 3 * MIB, monkeypatch)
    assert dropped_in_two_passes(decides, blocks, monkeypatch) == evicted


def test_other_mapped_files_leave_less_memory_while_they_are_used(
    blocks: list[MappedBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, others, found = 0.0, [5 * MIB, 3 * MIB, *[2 * MIB] * residency.USED_MEASUREMENTS], []
    monkeypatch.setattr(residency.time, "monotonic", lambda: now)
    monkeypatch.setattr(residency, "resident_file_bytes", lambda: others.pop(0))
    monkeypatch.setattr(residency, "page_cache_bytes", lambda used: found.append(used) or 2**40)
    decides = Residency(blocks, None, StreamStats())
    while others:
        decides.measure()
        now += 1.5
    assert (found[0], found[2], found[-2], found[-1]) == (5 * MIB, 5 * MIB, 3 * MIB, 2 * MIB)
