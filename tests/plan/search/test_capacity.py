from __future__ import annotations

from bigmodel.plan.search.capacity import Item, Room


def test_a_quantised_item_takes_less_where_it_is_streamed_from_and_all_where_it_is_run() -> None:
    plain, quantised = Item(weights=8, working=2), Item(weights=8, working=2, offloaded=3)
    assert (plain.held_bytes(streams=True), plain.held_bytes(streams=False)) == (8, 8)
    assert (quantised.held_bytes(streams=True), quantised.held_bytes(streams=False)) == (3, 8)
    assert plain.nbytes == quantised.nbytes == 10


def test_accelerators_are_the_devices_with_computing_power_and_a_budget() -> None:
    assert Room({0: 0, 1: 5, "mps": 7, "cpu": 9, "disk": 9}).accelerators == [1, "mps"]


def test_the_main_device_is_the_one_asked_for_else_the_first_accelerator_else_the_host() -> None:
    assert Room({0: 5, 1: 5, "cpu": 9}, main_device=1).main == 1
    assert Room({0: 0, 1: 5, "cpu": 9}).main == 1
    assert Room({0: 0, "cpu": 9}).main == "cpu"
