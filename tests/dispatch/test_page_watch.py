"""Whether the kernel has taken pages away."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.dispatch import page_watch
from bigmodel.dispatch.mapped_block import MappedBlock
from bigmodel.dispatch.page_watch import PageWatch

from .mapped import mapped_blocks


class Kernel:
    """What the watch asks."""

    faults = 0
    now = 100.0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(page_watch, "major_faults", lambda: found.faults)
    monkeypatch.setattr(page_watch.time, "monotonic", lambda: found.now)
    return found


@pytest.fixture
def block(tmp_path: Path) -> MappedBlock:
    (made,), _ = mapped_blocks(tmp_path, 1, elements=100)
    return made


def test_nothing_is_ready_before_it_was_said_to_be(kernel: Kernel, block: MappedBlock) -> None:
    watch = PageWatch()
    assert not watch.all_ready
    assert not watch.has_lost(block), "what was never there is not lost"


def test_a_page_that_had_to_be_read_again_tells(kernel: Kernel, block: MappedBlock) -> None:
    watch = PageWatch()
    kernel.faults = 3
    watch.begin()
    assert watch.all_ready
    assert not watch.has_lost(block)
    kernel.faults = 4
    assert watch.has_lost(block)
    assert not watch.all_ready


def test_a_first_page_that_is_gone_tells(kernel: Kernel, block: MappedBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = PageWatch()
    watch.begin()
    monkeypatch.setattr(MappedBlock, "seems_in_memory", lambda self: False)
    assert watch.has_lost(block)


def test_it_looks_now_and_then_only(kernel: Kernel, block: MappedBlock) -> None:
    watch = PageWatch()
    watch.begin()
    assert watch.seems_complete(block)
    kernel.faults = 1
    kernel.now += page_watch.LOOK_SECONDS / 2
    assert watch.seems_complete(block)
    kernel.now += page_watch.LOOK_SECONDS
    assert not watch.seems_complete(block)
