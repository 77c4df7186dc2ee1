"""Device maps and budgets as accelerate makes them."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bigmodel.compat import modeling as accelerate_modeling
from bigmodel.errors import BudgetError
from bigmodel.plan import check_device_map, get_balanced_memory, infer_auto_device_map
from bigmodel.profile import compute_module_sizes, find_tied_parameters, named_tensors
from bigmodel.profile.model.tensors import owner_of

from ..profile.models import Block, Flat, Stack, on_meta

pytestmark = pytest.mark.usefixtures("accelerators")


def test_a_model_that_fits_is_one_entry() -> None:
    assert infer_auto_device_map(Flat(), {0: 236}) == {"": 0}
    assert infer_auto_device_map(Flat(), {"cpu": 1000}) == {"": "cpu"}


def test_a_slot_is_reserved_only_if_a_layer_is_streamed() -> None:
    assert infer_auto_device_map(Flat(), {0: 200, 1: 200}) == {"linear1": 0, "batchnorm": 0, "linear2": 1}


def test_the_rest_goes_to_ram_then_disk() -> None:
    found = infer_auto_device_map(Flat(), {0: 50, "cpu": 80})
    assert found == {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}


def test_layers_after_one_that_does_not_fit_are_placed() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), *(nn.Linear(100, 100) for _ in range(10)))
    found = infer_auto_device_map(model, {0: 3_000_000, "cpu": 10_000_000}, clean_result=False)
    assert found["0"] == "cpu"
    assert {found[str(index)] for index in range(1, 11)} == {0}


def test_buffers_and_parameters_of_a_split_module_are_placed() -> None:
    model = on_meta(Stack, depth=4, direct=True)
    size = compute_module_sizes(model)[""]
    found = infer_auto_device_map(model, {0: size // 2, 1: size // 2, "cpu": size})
    check_device_map(model, found)
    assert "offset" in found


def test_blocks_stay_whole_without_being_named() -> None:
    found = infer_auto_device_map(nn.Sequential(Block(4), Block(4), Block(4)), {0: 500, 1: 500, "cpu": 500})
    assert all(name.count(".") == 0 for name in found)


def test_blocks_are_split_if_none_fits_and_that_is_asked_for() -> None:
    model = nn.Sequential(Block(4), Block(4))
    budgets = {0: compute_module_sizes(model)["0"], "cpu": 10**6}
    assert set(infer_auto_device_map(model, budgets).values()) == {"cpu"}
    assert 0 in infer_auto_device_map(model, budgets, fallback_allocation=True).values()
    named = infer_auto_device_map(model, budgets, ["Block"], fallback_allocation=True)
    assert set(named.values()) == {"cpu"}


def test_buffers_that_have_no_room_where_offloaded_layers_run_are_warned_about() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(64), nn.BatchNorm1d(64))
    with pytest.warns(UserWarning, match="buffers of layers that are not resident take") as warned:
        infer_auto_device_map(model, {0: 1300, "cpu": 10**6})
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(model, {0: 1300, "cpu": 10**6}, offload_buffers=True)


def test_an_empty_list_splits_down_to_leaves() -> None:
    found = infer_auto_device_map(nn.Sequential(Flat(), Flat()), {0: 300, 1: 300}, [])
    assert found["0"] == 0
    assert found["1.linear1"] == 0
    assert found["1.linear2"] == 1


def test_dtypes_change_what_fits() -> None:
    assert infer_auto_device_map(Flat(), {0: 122}, dtype="float16") == {"": 0}
    special = {name: "int8" for name, *_ in named_tensors(Flat())}
    assert infer_auto_device_map(Flat(), {0: 58}, special_dtypes=special) == {"": 0}


def test_a_model_that_does_not_fit_is_an_error_with_sufficient_budgets() -> None:
    with pytest.raises(BudgetError, match=r"'disk': 172 B"):
        infer_auto_device_map(Flat(), {0: 50, "cpu": 80, "disk": 10})
    assert infer_auto_device_map(Flat(), {0: 50, "cpu": 80, "disk": 172})


@pytest.mark.slow
def test_at_least_as_many_bytes_are_resident_as_with_accelerate() -> None:
    from accelerate import infer_auto_device_map as reference

    sizes = compute_module_sizes(Stack(depth=6))
    for budget in range(2_000, 30_000, 1_500):
        theirs = reference(Stack(depth=6), {0: budget, "cpu": 10**6}, ["Block"])
        ours = infer_auto_device_map(Stack(depth=6), {0: budget, "cpu": 10**6})
        resident = [sum(sizes[n] for n, d in found.items() if d == 0) for found in (ours, theirs)]
        assert resident[0] >= resident[1]


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.lists(st.integers(0, 6_000), min_size=1, max_size=3),
    st.integers(0, 6_000),
    st.booleans(),
)
def test_every_tensor_has_one_place_budgets_hold_and_ties_stay_together(
    widths: list[int], accelerators: list[int], host: int, tied: bool
) -> None:
    model = nn.Sequential(*(nn.Linear(width, width) for width in widths))
    if tied and widths[0] == widths[-1]:
        model[-1].weight = model[0].weight
    budgets: dict[int | str, int] = {**dict(enumerate(accelerators)), "cpu": host}
    found = infer_auto_device_map(model, budgets)
    check_device_map(model, found)
    used: dict[object, int] = {}
    seen = set()
    for name, tensor, *_ in named_tensors(model):
        device = found[str(owner_of(name, found))]
        if (id(tensor), device) not in seen:
            seen.add((id(tensor), device))
            used[device] = used.get(device, 0) + tensor.nbytes
    assert all(used.get(device, 0) <= budget for device, budget in budgets.items())
    for names in find_tied_parameters(model):
        assert len({found[str(owner_of(name, found))] for name in names}) == 1


def test_two_devices_share_a_model_evenly() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(8)))
    budgets = get_balanced_memory(model, {0: 10_000, 1: 10_000, "cpu": 50})
    assert budgets == {0: 4 * 440, 1: 4 * 440, "cpu": 50}
    assert list(infer_auto_device_map(model, budgets, clean_result=False).values()) == [0] * 4 + [1] * 4


def test_gaps_in_device_numbers_are_accepted() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)))
    budgets = get_balanced_memory(model, {1: 10_000, 3: 10_000}, low_zero=True)
    assert budgets == {1: 0, 3: 4 * 440}


def test_get_balanced_memory_leaves_a_single_device_unchanged() -> None:
    assert get_balanced_memory(Flat(), {0: 300, "cpu": 9}) == {0: 300, "cpu": 9}


def test_blocks_of_different_sizes_are_balanced_by_their_bytes() -> None:
    class Dense(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width, bias=False)

    model = nn.ModuleList([*(Dense(4) for _ in range(3)), *(Dense(64) for _ in range(3))])
    budgets = get_balanced_memory(model, {0: 10**6, 1: 10**6})
    assert max(budgets.values()) == 2 * 64 * 64 * 4


def test_ties_are_counted_once() -> None:
    model = on_meta(Stack, depth=2, tied=True)
    budgets = get_balanced_memory(model, {0: 10**6, 1: 10**6})
    assert set(infer_auto_device_map(model, budgets).values()) == {0, 1}


def test_budgets_may_be_fractions_of_bytes_as_callers_take_shares_of_what_is_free() -> None:
    model = nn.Linear(4, 4)
    assert infer_auto_device_map(model, {"cpu": 1000 * 0.901}) == {"": "cpu"}
    assert get_balanced_memory(model, {"cpu": 900.5}) == {"cpu": 900}
    given = {"cpu": 900.5, "disk": "1KB"}
    assert accelerate_modeling.get_max_memory(given) == {"cpu": 900, "disk": 1000}  # type: ignore[arg-type]
