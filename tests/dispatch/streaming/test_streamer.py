"""Slots, fetches and prefetch, without modules: a registry stands for a module's `_parameters`."""

from __future__ import annotations

import threading

import pytest
import torch

from bigmodel.dispatch.streaming.streamer import Streamer
from bigmodel.dispatch.weights.block import Block, HostTensor
from bigmodel.errors import DispatchError
from tests.examples import alike, every

from ...accelerators import at, held
from ..interrupting import interrupted_at

pytestmark = pytest.mark.usefixtures("every_accelerator")

Registry = dict[str, torch.Tensor]


def blocks(count: int, elements: int = 100) -> tuple[list[Block], list[Registry]]:
    """Return blocks of one tensor each, block n holding the number n, and the registries that show them."""
    registries: list[Registry] = [{"weight": torch.full((elements,), float(n))} for n in range(count)]
    made = [
        Block(str(n), [HostTensor(registry["weight"], torch.float32, [(registry, "weight")])])
        for n, registry in enumerate(registries)
    ]
    return made, registries


def streamer_of(made: list[Block], slots: int = 2) -> Streamer:
    return Streamer(torch.device(at(0)), made, slots)


def test_a_block_is_on_the_device_while_it_is_used_and_on_the_host_otherwise() -> None:
    made, registries = blocks(3)
    host = [registry["weight"] for registry in registries]
    streamer = streamer_of(made)
    for n, block in enumerate(made):
        with streamer.use(block):
            assert str(registries[n]["weight"].device) == at(0)
            assert registries[n]["weight"].cpu().tolist() == [n] * 100
        assert registries[n]["weight"] is host[n]


def test_device_memory_is_the_slots_and_never_more() -> None:
    made, _ = blocks(6, elements=1000)
    streamer = streamer_of(made, slots=2)
    assert streamer.slot_bytes == held(0) == 2 * 4096
    for _ in range(3):
        for block in made:
            with streamer.use(block):
                assert held(0) == 2 * 4096


def test_the_order_is_learned_and_the_next_block_fetched_ahead() -> None:
    made, _ = blocks(5)
    streamer = streamer_of(made)
    for block in made:
        with streamer.use(block):
            pass
    assert streamer.stats.misses == 1, "the first time through, the given order is the guess"
    streamer.stats.reset()
    for _ in range(3):
        for block in reversed(made):
            with streamer.use(block):
                pass
    # Four steps back and the one from the first to the last had not been seen before.
    assert streamer.stats.misses == 5
    assert streamer.stats.hits == 10


@pytest.mark.parametrize("order", [[0, 2, 4], [0, 0, 1, 1], [4, 3, 2, 1, 0], [1]])
def test_a_wrong_guess_costs_time_and_nothing_else(order: list[int]) -> None:
    made, registries = blocks(5)
    streamer = streamer_of(made)
    for n in [*range(5), *order, *range(5)]:
        with streamer.use(made[n]):
            assert registries[n]["weight"].cpu().tolist() == [n] * 100


def test_one_slot_is_enough() -> None:
    made, registries = blocks(3)
    streamer = streamer_of(made, slots=1)
    for _ in range(2):
        for n, block in enumerate(made):
            with streamer.use(block):
                assert registries[n]["weight"].cpu()[0] == n


def test_blocks_that_all_have_slots_are_fetched_once() -> None:
    made, _ = blocks(2)
    streamer = streamer_of(made, slots=2)
    for _ in range(5):
        for block in made:
            with streamer.use(block):
                pass
    assert streamer.stats.fetches == 2
    assert streamer.stats.bytes_from_ram == 2 * 400


def test_a_block_within_a_block_gets_room_of_its_own_when_the_slots_are_taken() -> None:
    made, registries = blocks(3)
    streamer = streamer_of(made, slots=1)
    with streamer.use(made[0]), streamer.use(made[1]), streamer.use(made[2]):
        assert [registry["weight"].cpu()[0].item() for registry in registries] == [0, 1, 2]
    assert held(0) == streamer.slot_bytes


def test_a_fetch_that_fails_is_reported_and_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made, registries = blocks(2)
    host = registries[0]["weight"]
    streamer = streamer_of(made)

    def fail(memory: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(made[0], "fetch", fail)
        with pytest.raises(OSError, match="the disk is gone"), streamer.use(made[0]):
            pass
    assert registries[0]["weight"] is host
    with streamer.use(made[0]):
        assert registries[0]["weight"].cpu()[0] == 0


def test_a_prefetch_that_failed_is_tried_again_by_who_needs_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made, registries = blocks(3)
    streamer = streamer_of(made)

    def fail(memory: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(made[1], "fetch", fail)
        with streamer.use(made[0]):
            assert registries[0]["weight"].cpu()[0] == 0
        with pytest.raises(OSError, match="the disk is gone"), streamer.use(made[1]):
            pass
        with streamer.use(made[0]):
            pass
    with streamer.use(made[1]):
        assert registries[1]["weight"].cpu()[0] == 1


def test_an_error_in_a_prefetched_block_is_raised_by_that_block_alone() -> None:
    made, registries = blocks(3)
    streamer = streamer_of(made)
    weight = registries[1]["weight"]
    registries[1]["weight"] = torch.zeros(3)
    for _ in range(3):
        with streamer.use(made[0]):
            assert registries[0]["weight"].cpu()[0] == 0
        with pytest.raises(DispatchError, match="replaced"), streamer.use(made[1]):
            pass
    registries[1]["weight"] = weight
    with streamer.use(made[1]), streamer.use(made[2]):
        assert [registry["weight"].cpu()[0].item() for registry in registries[1:]] == [1, 2]


@pytest.mark.slow
@alike("slots", [2, 1], first=1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts in finalizers
def test_an_interrupt_at_any_moment_leaves_everything_as_it_was(slots: int) -> None:
    made, registries = blocks(3)
    host = [registry["weight"] for registry in registries]
    streamer = streamer_of(made, slots)

    def visit_all() -> None:
        for block, registry in zip(made, registries):
            streamer.run(block, registry.copy)

    number = 0
    while interrupted_at(number, visit_all, within="/bigmodel/"):
        assert [registry["weight"] is each for registry, each in zip(registries, host)] == [True] * 3, number
        assert streamer.in_use == 0, number
        number += every(3)
    assert number > 100
    for expected, (block, registry) in enumerate(zip(made, registries)):
        shown = streamer.run(block, registry.copy)["weight"]
        assert shown.cpu()[0] == expected


@pytest.mark.slow
def test_threads_share_blocks_without_mixing_them_up() -> None:
    made, registries = blocks(5)
    streamer = streamer_of(made)
    wrong: list[object] = []

    def walk(start: int) -> None:
        for step in range(200):
            n = (start + step) % 5
            with streamer.use(made[n]):
                seen = registries[n]["weight"].cpu().unique().tolist()
            if seen != [n]:
                wrong.append((n, seen))

    threads = [threading.Thread(target=walk, args=(start,)) for start in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "threads wait for each other for ever"
    assert wrong == []
    assert all(registry["weight"].device.type != "virtual" for registry in registries)


def test_weights_written_on_the_host_are_fetched_again() -> None:
    made, registries = blocks(2)
    streamer = streamer_of(made)
    for _ in range(2):
        for block in made:
            with streamer.use(block):
                pass
    registries[0]["weight"].fill_(9)
    with streamer.use(made[0]):
        assert registries[0]["weight"].cpu()[0] == 9


def test_a_tensor_put_in_the_place_of_another_is_taken_over() -> None:
    made, registries = blocks(2)
    streamer = streamer_of(made)
    with streamer.use(made[0]):
        pass
    new = registries[0]["weight"] = torch.full((100,), 7.0)
    with streamer.use(made[0]):
        assert registries[0]["weight"].cpu()[0] == 7
    assert registries[0]["weight"] is new


def test_a_tensor_of_another_shape_in_its_place_is_refused() -> None:
    made, registries = blocks(1)
    streamer = streamer_of(made)
    with streamer.use(made[0]):
        pass
    registries[0]["weight"] = torch.zeros(3)
    with pytest.raises(DispatchError, match="another shape"), streamer.use(made[0]):
        pass


def test_state_written_on_the_device_comes_back_to_the_host() -> None:
    state = torch.zeros(4)
    registry = {"count": state}
    block = Block("counter", [HostTensor(state, torch.float32, [(registry, "count")], is_buffer=True)])
    streamer = streamer_of([block])
    for _ in range(3):
        with streamer.use(block):
            registry["count"].add_(1)
    assert state.tolist() == [3.0] * 4


def test_tensors_shown_by_another_forward_are_left_as_they_are() -> None:
    """A forward that wants gradients shows leaves of its own in a block that another thread enters."""
    made, registries = blocks(1)
    streamer = streamer_of(made)
    with streamer.use(made[0]):
        leaf = torch.ones(100, requires_grad=True)
        made[0].show([leaf])
        with streamer.use(made[0]):
            assert registries[0]["weight"] is leaf
        assert registries[0]["weight"] is leaf


def test_a_weight_that_is_returned_is_a_copy_that_later_blocks_do_not_overwrite() -> None:
    made, registries = blocks(4)
    streamer = streamer_of(made)
    part, others = streamer.run(made[0], lambda: (registries[0]["weight"][2:5], {"all": registries[0]["weight"]}))
    for block in made[1:]:
        streamer.run(block, lambda: None)
    assert part.cpu().tolist() == [0.0] * 3
    assert others["all"].cpu().tolist() == [0.0] * 100


def test_replaced_tensors_are_adopted_unless_the_devices_tensors_are_shown() -> None:
    made, registries = blocks(1)
    streamer = streamer_of(made)
    with streamer.use(made[0]):
        streamer.adopt_replaced(made[0])
    assert made[0].tensors[0].value.tolist() == [0.0] * 100
    new = registries[0]["weight"] = torch.ones(100)
    streamer.adopt_replaced(made[0])
    assert made[0].tensors[0].value is new


def test_a_state_that_cannot_be_kept_is_an_error_and_leaves_the_slot_free() -> None:
    state = torch.zeros(4)
    registry = {"count": state}
    block = Block("counter", [HostTensor(state, torch.float32, [(registry, "count")], is_buffer=True)])
    streamer = streamer_of([block])
    with pytest.raises(DispatchError, match=r"'count' of 'counter'.*changed its shape"):
        streamer.run(block, lambda: registry.update(count=torch.zeros(5)))
    assert streamer.in_use == 0
    assert registry["count"] is state
