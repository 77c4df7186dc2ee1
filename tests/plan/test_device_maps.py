"""Device maps that users give: which tensors they cover, and how they are shortened."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import DeviceMapError
from bigmodel.plan import check_device_map, clean_device_map
from bigmodel.profile.model.tensors import owner_of

from ..profile.models import Flat, Stack

pytestmark = pytest.mark.usefixtures("accelerators")


def test_a_map_that_covers_everything_is_accepted() -> None:
    check_device_map(Flat(), {"linear1": 0, "batchnorm": 1, "linear2": "disk"})
    check_device_map(Flat(), {"": "cpu"})
    check_device_map(Stack(direct=True), {"embed": 0, "blocks": 0, "norm": 0, "head": 0, "scale": 0, "offset": 1})


def test_tensors_without_a_place_are_named() -> None:
    with pytest.raises(DeviceMapError, match=r"scale"):
        check_device_map(Stack(direct=True), {"embed": 0, "blocks": 0, "norm": 0, "head": 0, "offset": 0})
    with pytest.raises(ValueError, match=r"linear2\.weight, linear2\.bias"):
        check_device_map(Flat(), {"linear1": 0, "batchnorm": 0})


def test_names_that_are_not_in_the_model_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_device_map(Flat(), {"": 0, "linear9": 1})
    assert "linear9" in caplog.text


def test_a_parameter_is_a_name_like_a_module(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_device_map(Flat(), {"": 0, "linear1.weight": 1})
    assert caplog.text == ""


def test_the_longest_name_owns() -> None:
    device_map = {"": 0, "a": 1, "a.b": 2}
    assert owner_of("a.b.c", device_map) == "a.b"
    assert owner_of("a.bc", device_map) == "a"
    assert owner_of("x", device_map) == ""
    assert owner_of("x", {"a": 1}) is None


def test_siblings_on_one_device_become_their_parent_in_place_and_in_order() -> None:
    device_map = {"a": 0, "b.1": 1, "b.2": 1, "c.1": 0, "c.2": 1}
    assert clean_device_map(device_map) is device_map
    assert list(device_map.items()) == [("a", 0), ("b", 1), ("c.1", 0), ("c.2", 1)]
    assert clean_device_map({"a.b": 0, "a.c": 0}) == {"": 0}
    assert clean_device_map({"a.b": 0}) == {"a.b": 0}


def test_only_entries_below_the_given_module_are_merged() -> None:
    assert clean_device_map({"a.b": 0, "a.c": 0, "d.e": 1, "d.f": 1}, "a") == {"a": 0, "d.e": 1, "d.f": 1}


@given(st.dictionaries(st.sampled_from([f"{a}.{b}.{c}" for a in "xy" for b in "pq" for c in "12"]),
                       st.sampled_from([0, 1, "cpu"]), min_size=1))  # fmt: skip
def test_tidying_changes_no_tensors_device_and_agrees_with_accelerate(device_map: dict[str, int | str]) -> None:
    from accelerate.utils.modeling import clean_device_map as reference

    tidy = clean_device_map(dict(device_map))
    assert all(tidy[str(owner_of(name, tidy))] == device for name, device in device_map.items())
    assert tidy == reference(dict(device_map))
