import sys

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.virtual.arena import Arena, Caching

from ...dispatch.interrupting import interrupted_at
from ...examples import alike, every


def test_views_share_the_booking_of_their_storage() -> None:
    arena = Arena(0)
    base = torch.zeros(100, dtype=torch.uint8)
    booking = arena.claim(base)
    assert arena.claim(base[10:20]) is booking
    assert arena.allocated == 100


def test_the_last_holder_gives_the_bytes_back() -> None:
    arena = Arena(0)
    base = torch.zeros(100, dtype=torch.uint8)
    first, second = arena.claim(base), arena.claim(base[1:])
    del first
    assert arena.allocated == 100
    del second
    assert arena.allocated == 0
    assert arena.peak == 100


def test_empty_tensors_cost_nothing() -> None:
    arena = Arena(0, capacity=0)
    assert arena.claim(torch.empty(0)) is None


def test_a_refused_booking_leaves_the_books_as_they_were() -> None:
    arena = Arena(3, capacity=150)
    kept = arena.claim(torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(torch.OutOfMemoryError, match=r"virtual:3 .* 100 B of 150 B"):
        arena.claim(torch.zeros(51, dtype=torch.uint8))
    assert kept is not None
    assert (arena.allocated, arena.peak) == (100, 100)


def test_a_caching_arena_rounds_up_and_keeps_what_is_freed() -> None:
    arena = Arena(0, caching=Caching(context=2**20))
    base = torch.zeros(100, dtype=torch.uint8)
    held = arena.claim(base)
    assert arena.allocated == 512
    del held
    assert arena.allocated == 0
    assert arena.memory.reserved.now == 2 * 2**20
    arena.empty_cache()
    assert arena.memory.reserved.now == 0


def test_a_caching_arena_is_full_when_its_segments_and_its_context_are() -> None:
    arena = Arena(3, capacity=4 * 2**20, caching=Caching(context=2**20))
    base = torch.zeros(2**20, dtype=torch.uint8)  # kept, or the next tensor may have its address
    kept = arena.claim(base)
    with pytest.raises(torch.OutOfMemoryError, match=r"virtual:3 .* 3.* MiB of 4.* MiB"):
        arena.claim(torch.zeros(2 * 2**20, dtype=torch.uint8))
    assert kept is not None


@pytest.mark.parametrize("strict", [True, False])
def test_freed_memory_of_a_strict_accelerator_is_poisoned(strict: bool) -> None:
    """A use after free is seen: who still reads it, as a stream may on a GPU, reads NaN. Views keep it alive."""
    virtual.enable(1, strict=strict, late_compute=False)
    tensor = torch.ones(8, device="virtual:0")
    whole, view = tensor.held, tensor[2:4]  # type: ignore[attr-defined]
    del tensor
    assert whole.sum() == 8
    assert view.sum().item() == 2
    del view
    assert bool(whole.isnan().all()) == strict
    virtual.disable()


@pytest.mark.slow
@alike(
    ("caching", "strict"),
    [
        *((None, strict) for strict in (True, False)),
        *((caching, strict) for strict in (False, True) for caching in (Caching(), Caching(workspace=2**20))),
    ],
    first=4,
)
def test_an_interrupt_loses_no_count(caching: Caching | None, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's allocators are not interrupted: what was allocated is freed, and what was freed can be had again."""
    # Python cannot raise what interrupts the end of an object. pytest would keep its frames, and what they refer to.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    sizes = (600, 3 * 2**20, 200, 12 * 2**20)
    storages = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    number, interrupted = 0, True
    while interrupted:
        arena = Arena(0, caching=caching)
        arena.strict = strict

        def use(arena: Arena = arena) -> None:
            held = [arena.claim(each) for each in storages]
            arena.need_workspace()
            del held[1::2]
            held += [arena.claim(each) for each in storages]

        interrupted = interrupted_at(number, use)
        workspace = arena.memory.allocated.now
        assert workspace in (0, arena.workspace), number
        arena.empty_cache()
        if not workspace:
            assert (arena.memory.requested.now, arena.memory.reserved.now) == (0, 0), number
        kept = [arena.claim(each) for each in storages]
        assert arena.memory.requested.now == sum(sizes) + workspace, number
        del kept
        number += every(3)
    assert number > 50


def ended(arena: Arena, nbytes: int = 100) -> torch.Tensor:
    """Return memory whose allocation has ended while the arena was at work: it is not freed yet."""
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    allocation = arena.claim(memory)
    arena._is_at_work = True
    del allocation
    arena._is_at_work = False
    assert arena._ended
    return memory


def test_what_has_ended_is_freed_before_cached_memory_is_given_back() -> None:
    arena = Arena(0, caching=Caching())
    ended(arena)
    arena.empty_cache()
    assert arena._memory.reserved.now == 0


def test_what_has_ended_is_freed_before_a_workspace_is_allocated() -> None:
    arena = Arena(0, caching=Caching(workspace=512))
    ended(arena)
    arena.need_workspace()
    assert arena._memory.allocated.now == 512


def test_memory_that_is_claimed_while_its_allocation_ends_is_counted_once() -> None:
    arena = Arena(0)
    memory = ended(arena)
    arena._ended.clear()  # another thread has not queued it yet
    allocation = arena.claim(memory)
    assert allocation is not None
    assert arena.allocated == 100
