"""Which slot holds which block, and which is overwritten first, without threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch

from bigmodel.devices import Event
from bigmodel.devices.streams import PastEvent
from bigmodel.dispatch.streaming.slots import BlockSlot, BlockSlots, least_wanted
from bigmodel.dispatch.transfer.fetcher import Fetcher
from bigmodel.dispatch.weights.block import Block, HostTensor
from bigmodel.dispatch.weights.visits import StreamStats, VisitOrder


def slot(last_use: int, name: str | None = None) -> BlockSlot:
    return BlockSlot(torch.empty(0), content=None if name is None else Block(name, []), last_use=last_use)


def test_an_empty_slot_comes_first_however_lately_it_was_used() -> None:
    empty = slot(9)
    assert least_wanted([slot(1, "a"), empty, slot(2, "b")]) is empty


def test_of_full_slots_the_one_wanted_longest_ago_comes_first() -> None:
    oldest = slot(1, "a")
    assert least_wanted([slot(3, "b"), oldest, slot(2, "c")]) is oldest


def test_slots_of_equal_content_are_two() -> None:
    assert slot(1) != slot(1)


HOST = torch.device("cpu")


class Recording:
    """A copy stream that copies at once, and remembers after what it was told to."""

    def __init__(self) -> None:
        self.after: list[Sequence[Event]] = []
        self.marks: list[Event] = []

    def submit(self, work: Callable[[], None], after: Sequence[Event] = (), nbytes: int | None = None) -> Event:
        self.after.append(list(after))
        work()
        return PastEvent()

    def compute_mark(self) -> Event:
        self.marks.append(PastEvent())
        return self.marks[-1]

    def uses(self, memory: torch.Tensor) -> None:
        """Copied at once: the allocator need not know."""


@pytest.fixture
def stream() -> Recording:
    return Recording()


def blocks(count: int) -> list[Block]:
    """Return blocks of one tensor, block n holding the number n."""
    registries = [{"weight": torch.full((4,), float(n))} for n in range(count)]
    return [
        Block(str(n), [HostTensor(registry["weight"], torch.float32, [(registry, "weight")])])
        for n, registry in enumerate(registries)
    ]


def slots_of(made: list[Block], count: int, stream: Recording) -> BlockSlots:
    memory = [torch.empty(made[0].layout.nbytes, dtype=torch.uint8) for _ in range(count)]
    return BlockSlots(memory, stream, Fetcher(stream, HOST, StreamStats(), made), VisitOrder(made))


def fetched(slots: BlockSlots, block: Block) -> BlockSlot:
    slot = slots.free()
    assert slot is not None
    slots.fetch(block, slot)
    return slot


def test_a_fetched_block_is_found_until_it_is_forgotten(stream: Recording) -> None:
    made = blocks(2)
    slots = slots_of(made, 2, stream)
    assert slots.find_current(made[0]) is None
    slot = fetched(slots, made[0])
    assert slots.find_current(made[0]) is slot
    assert slots.holds(made[0], slot)
    slots.forget(slot)
    assert slots.find_current(made[0]) is None


def test_a_block_written_on_the_host_since_is_found_only_while_in_use(stream: Recording) -> None:
    made = blocks(1)
    slots = slots_of(made, 1, stream)
    slot = fetched(slots, made[0])
    slot.users = 1
    made[0].tensors[0].value.add_(1)
    assert slots.find_current(made[0]) is slot
    slot.users = 0
    assert slots.find_current(made[0]) is None


def test_slots_in_use_are_never_free(stream: Recording) -> None:
    made = blocks(2)
    slots = slots_of(made, 1, stream)
    slot = fetched(slots, made[0])
    assert slots.in_use == 0
    slot.users = 1
    assert slots.in_use == 1
    assert slots.free() is None
    slots.prefetch(made[0])
    assert slots.find_current(made[0]) is slot


def test_the_blocks_that_follow_are_fetched_into_what_is_free(stream: Recording) -> None:
    made = blocks(5)
    slots = slots_of(made, 3, stream)
    fetched(slots, made[0]).users = 1
    slots.prefetch(made[0])
    ahead = [slots.find_current(block) for block in made]
    assert [slot is not None and slot.prefetched for slot in ahead] == [False, True, True, False, False]
    assert slots.beyond(made[0]) == [made[3], made[4]]


def test_a_prefetch_that_cannot_begin_is_left_to_the_forward_that_needs_the_block(
    stream: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = blocks(2)
    slots = slots_of(made, 2, stream)
    fetched(slots, made[0]).users = 1

    def fail() -> bool:
        raise OSError("the disk is gone")

    monkeypatch.setattr(made[1], "adopt_replaced", fail)
    slots.prefetch(made[0])
    with pytest.raises(OSError, match="the disk is gone"):
        slots.fetch(made[1], slots.transient(made[1], HOST))


@pytest.mark.parametrize("transient", [False, True])
def test_memory_is_not_written_to_before_what_lay_there_is_done_with(stream: Recording, transient: bool) -> None:
    """Memory that was freed is handed out anew while the device may still have to compute with what lay in it."""
    made = blocks(1)
    slots = slots_of(made, 1, stream)
    if transient:
        slots.fetch(made[0], slots.transient(made[0], HOST))
    else:
        fetched(slots, made[0])
    assert stream.after == [[stream.marks[-1]]]


def test_in_a_child_the_host_tensors_are_shown_of_what_is_shown_on_the_device(stream: Recording) -> None:
    made = blocks(2)
    slots = slots_of(made, 2, stream)
    host = [block.tensors[0].value for block in made]
    shown = [torch.zeros(4), torch.zeros(4)]
    for block, tensor in zip(made, shown):
        slot = fetched(slots, block)
        slot.users, slot.shown = 1, block is made[0]
        block.show([tensor])
    slots.show_host()
    found = [registry[key] for block in made for registry, key in block.tensors[0].owners]
    assert found[0] is host[0]
    assert found[1] is shown[1], "what somebody else put there is left alone"


@pytest.mark.usefixtures("every_accelerator")
def test_tensors_in_the_slots_memory_are_copied_out_of_it_and_others_left() -> None:
    slot, other = BlockSlot(torch.zeros(16)), torch.zeros(4)
    value = {"part": slot.memory[2:6], "deep": [(slot.memory[8:], other)], "number": 3}
    found = slot.copied_out(value)
    slot.memory.fill_(1)
    assert found["part"].tolist() == [0] * 4
    assert found["deep"][0][0].tolist() == [0] * 8
    assert found["deep"][0][1] is other
    untouched = [other, "text"]
    assert slot.copied_out(untouched) is untouched


class Unfinished(PastEvent):
    """The event of compute that is still under way."""

    def done(self) -> bool:
        return False


@pytest.mark.parametrize("fails", [False, True])
def test_memory_in_use_is_waited_for_again_if_its_fetch_never_got_to_copying(stream: Recording, fails: bool) -> None:
    """A fetch may fail, or be cancelled after it was queued, before any copy has waited for the compute."""
    (block,) = made = blocks(1)
    slots = slots_of(made, 1, stream)
    slot, computing, waited = slots.free(), Unfinished(), []
    assert slot is not None
    slot.mark(computing)

    def cancelled(memory: torch.Tensor, after: Sequence[Event]) -> Event:
        waited.append(list(after))
        if fails:
            raise OSError("the disk is gone")
        return PastEvent()

    for _ in range(2):
        with pytest.raises(OSError) if fails else nullcontext():
            slots.fill(slot, block, 0, cancelled)
    assert computing in waited[0]
    assert computing in waited[1]
