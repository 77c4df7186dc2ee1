"""State that threads share is used under its lock: without one, a loss would show in one run of thousands."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from bigmodel.devices import copy_stream
from bigmodel.devices.streams import PastEvent, TimedCopyStream
from bigmodel.dispatch.attach.host_or_device import HostOrDevice
from bigmodel.dispatch.experts.cache import ExpertCache
from bigmodel.dispatch.mapped import readahead
from bigmodel.dispatch.mapped.readahead import ReadAhead
from bigmodel.dispatch.streaming.slots import BlockSlot
from bigmodel.dispatch.streaming.streamer import Streamer
from bigmodel.dispatch.transfer import staging
from bigmodel.dispatch.transfer.disk_reader import DiskReader
from bigmodel.dispatch.transfer.files import SourceFile
from bigmodel.dispatch.transfer.page_cache import ReadMode, ReadPolicy
from bigmodel.dispatch.transfer.quantized_transfer import Transfer
from bigmodel.dispatch.transfer.read_job import ReadJob
from bigmodel.dispatch.transfer.speculative_reads import SpeculativeReads
from bigmodel.dispatch.transfer.staging import StagingSlots
from bigmodel.dispatch.weights.visits import StreamStats
from bigmodel.plan import StagingMemory

from .experts.test_cache import acquired, layers
from .guarded import OwnedLock, guard, guard_method
from .mapped_files import checkpoint_file, mapped_blocks, streamed_blocks
from .streaming.test_slots import blocks

HOST = torch.device("cpu")


class Failed(PastEvent):
    """The event of a fetch that has failed."""

    def __init__(self) -> None:
        super().__init__(OSError("the disk is gone"))


class Interrupted(PastEvent):
    """The event of a fetch that is under way when the wait for it is interrupted."""

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise KeyboardInterrupt


def test_slots_of_blocks_are_used_under_the_lock_of_the_streamer(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = guard(monkeypatch, Streamer, "_slots")
    made = blocks(4)
    streamer = Streamer(HOST, made, 2)
    noted.clear()  # those before any other thread knows of it
    shown = [guard_method(monkeypatch, BlockSlot, name, streamer._lock) for name in ("show", "show_host", "mark")]
    for block in made * 2:
        streamer.adopt_replaced(block)
        with streamer.use(block):
            pass
    assert [noted, *shown] == [[], [], [], []]


def test_a_slot_whose_fetch_failed_is_emptied_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = made = blocks(1)
    streamer = Streamer(HOST, made, 1)
    with streamer.use(block):
        pass
    slot = streamer._slots.slots[0]
    slot.ready = Failed()
    noted = guard(monkeypatch, Streamer, "_slots")
    with pytest.raises(OSError, match="the disk is gone"), streamer.use(block):
        pass
    assert noted == []
    assert slot.content is None


def test_slots_keep_what_is_fetched_when_a_wait_for_it_is_interrupted() -> None:
    (block,) = made = blocks(1)
    streamer = Streamer(HOST, made, 1)
    with streamer.use(block):
        pass
    slot = streamer._slots.slots[0]
    slot.ready = Interrupted()
    with pytest.raises(KeyboardInterrupt), streamer.use(block):
        pass
    assert slot.content is block
    layer, _ = both = layers()
    cache = ExpertCache(HOST, both, 3)
    held = acquired(cache, layer, [0], wait=False)
    (number,) = held
    cache._slots[number].ready = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        cache.await_arrival(held)
    assert cache._slots[number].content is not None


def test_slots_of_experts_are_used_under_the_lock_of_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that a call holds, whose arrival it awaits."""
    first, second = made = layers()
    cache = ExpertCache(HOST, made, 3)
    unlocked = guard(monkeypatch, ExpertCache, "_slots")
    held = acquired(cache, first, [0, 1], wait=False)
    cache.record(first, [0, 1])
    cache.fetch_ahead(second, [2])
    assert unlocked == []
    cache.await_arrival(held)
    unlocked.clear()
    cache.release(held)
    assert unlocked == []


def test_experts_whose_fetch_failed_are_released_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = made = layers()
    cache = ExpertCache(HOST, made, 3)
    held = acquired(cache, first, [0], wait=False)
    cache._slots[held[0]].ready = Failed()
    unlocked = guard(monkeypatch, ExpertCache, "_slots")
    with pytest.raises(OSError, match="the disk is gone"):
        cache.await_arrival(held)
    assert len(unlocked) == 1, "only the read of the event"


def test_who_waits_for_a_slot_is_woken_when_the_fetch_into_it_fails() -> None:
    first, second = made = layers()
    cache = ExpertCache(HOST, made, 1)
    held = acquired(cache, first, [0], wait=False)
    cache._slots[held[0]].ready = Failed()
    waiting = threading.Thread(target=lambda: acquired(cache, second, [1]), daemon=True)
    waiting.start()
    while not cache._changed._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    with pytest.raises(OSError, match="the disk is gone"):
        cache.await_arrival(held)
    waiting.join(60)
    assert not waiting.is_alive()


def test_who_waits_for_a_slot_of_a_streamer_is_woken_when_its_user_leaves_it() -> None:
    first, second = made = blocks(2)
    streamer = Streamer(HOST, made, 1)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with streamer.use(first):
            entered.set()
            leave.wait(60)

    def take() -> None:
        with streamer.use(second):
            pass

    holding, waiting = (threading.Thread(target=each, daemon=True) for each in (hold, take))
    holding.start()
    assert entered.wait(60)
    waiting.start()
    end = time.monotonic() + 20
    while not streamer._changed._waiters and time.monotonic() < end:  # type: ignore[attr-defined]
        time.sleep(0.001)
    leave.set()
    waiting.join(20)
    assert not waiting.is_alive()


def test_jobs_of_a_reader_are_used_under_its_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noted = guard(monkeypatch, DiskReader, "_jobs")
    reader = DiskReader(copy_stream(HOST), ReadPolicy(0), StreamStats(), StagingMemory(8192, 6))
    reader._lock = OwnedLock()  # type: ignore[assignment]
    finished = guard_method(monkeypatch, ReadJob, "set_outcome", reader._lock)
    made, _ = streamed_blocks(tmp_path, count=2, elements=4096)
    memory = [torch.zeros(block.layout.nbytes, dtype=torch.uint8) for block in made]
    for event in [reader.fetch(Transfer(block, each), ()) for block, each in zip(made, memory)]:
        event.wait()
    monkeypatch.setattr(reader, "_fill", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        reader.fetch(Transfer(made[0], memory[0]), ()).wait()
    assert (noted, finished) == ([], [])


def test_expected_blocks_are_used_under_their_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = guard(monkeypatch, SpeculativeReads, "_expected")
    reads = SpeculativeReads()
    reads._lock = OwnedLock()  # type: ignore[assignment]
    made = blocks(2)
    reads.expect(made)
    assert reads._next_expected() is made[0]
    assert reads.take(made[1], None) == []  # type: ignore[arg-type]
    assert noted == []


def test_staging_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = guard(monkeypatch, staging.StagedBytes, "_whole")
    slots = StagingSlots(StagingMemory(4096, 6), pin=False)
    memory = slots.free[0]._memory
    memory._lock = OwnedLock()  # type: ignore[assignment]
    assert memory.part(1).data_ptr() == memory.part(0).data_ptr() + 4096
    assert noted == ["StagedBytes._whole"] * 2, "only the reads of what is there by then"


@pytest.mark.usefixtures("accelerators")
def test_copies_that_are_timed_are_counted_under_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = guard(monkeypatch, TimedCopyStream, "_running")
    device, seconds = torch.device("virtual", 0), []
    stream = TimedCopyStream(copy_stream(device), device, seconds.append)
    stream._lock = OwnedLock()  # type: ignore[assignment]
    for _ in range(6):
        stream.submit(lambda: None)
    assert noted == []
    assert seconds


COUNTERS = ("bytes_from_ram", "fetches", "seconds_on_link", "_readers", "seconds_reading")


def test_counters_are_used_under_their_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = [guard(monkeypatch, StreamStats, name) for name in COUNTERS]
    stats = StreamStats()
    stats._lock = lock = OwnedLock()  # type: ignore[assignment]
    stats.reset()
    stats.add(from_ram=1)
    stats.add_fetch()
    stats.add_link_seconds(1.0)
    with stats.reading():
        pass
    assert noted == [[]] * len(COUNTERS)
    taken = lock.entered
    assert stats.as_dict()["fetches"] == 1
    assert lock.entered == taken + 1, "all counters are read while none of them changes"


def test_the_choice_to_bypass_the_page_cache_is_made_under_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = [guard(monkeypatch, ReadPolicy, name) for name in ("_cold", "_pace")]
    policy = ReadPolicy(2**60)
    policy._lock = OwnedLock()  # type: ignore[assignment]
    assert policy.mode(cached=False, offset=0x1000) is ReadMode.DIRECT
    policy.record(bypassed=True, nbytes=1000, seconds=1.0)
    assert noted == [[], []]


def test_a_file_is_mapped_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noted = guard(monkeypatch, SourceFile, "_map")
    path = checkpoint_file(tmp_path, 1, 2**10)
    file = SourceFile(path, os.open(path, os.O_RDONLY))
    file._lock = OwnedLock()  # type: ignore[assignment]
    assert file._whole() is file._whole()
    assert noted == []


def test_a_reader_ahead_is_left_under_its_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noted = guard(monkeypatch, ReadAhead, "_inside")
    made, _ = mapped_blocks(tmp_path, 2, elements=2**14)
    reader = ReadAhead(made, 2**14)
    for block in made * 2:
        reader.visit(block, lambda _: None)
    assert noted == []


def test_who_waits_for_a_reader_ahead_is_woken_when_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reader counts itself as gone under the lock."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(readahead, "page_in", fail)
    noted = guard(monkeypatch, ReadAhead, "_working")
    made, _ = mapped_blocks(tmp_path, 1, elements=2**14)
    reader = ReadAhead(made, None)
    raised: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="paging in the weights of '0' failed") as error:
            reader.visit(made[0], lambda _: None)
        raised.append(str(error.value))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(30)
    assert raised
    reader._pool.shutdown()
    assert noted == []


def test_a_block_is_computed_on_one_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants the other device waits until all have left, and is woken then."""
    noted = guard(monkeypatch, HostOrDevice, "_users")
    turns = HostOrDevice(8, ())
    on_host: list[bool] = []
    other = threading.Thread(target=lambda: turns.visit(False, on_host.append), daemon=True)

    def compute(held: list[bool]) -> list[bool]:
        other.start()
        while not turns._changed._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        assert on_host == []
        return list(held)

    assert turns.visit(True, compute) == [True]
    other.join(30)
    assert on_host == [[False]] or not other.is_alive()
    assert noted == []
