import pytest

from bigmodel.dispatch.placement.tensors import DeviceMapLookup
from bigmodel.errors import DeviceMapError

from ..models import stack

pytestmark = pytest.mark.usefixtures("accelerators")


def test_the_longest_name_counts() -> None:
    placement = DeviceMapLookup({"": "cpu", "blocks": 0, "blocks.1": "disk", "blocks.1.up.weight": 1})
    assert placement.storage_device("head") == "cpu"
    assert placement.storage_device("blocks.0.up.weight") == "virtual:0"
    assert placement.storage_device("blocks.1.up.bias") == "disk"
    assert placement.storage_device("blocks.1.up.weight") == "virtual:1"
    assert placement.storage_device("blocks.10") == "virtual:0"


def test_tensors_that_the_map_does_not_cover_are_named() -> None:
    with pytest.raises(DeviceMapError, match=r"'head\.weight'"):
        DeviceMapLookup({"blocks": 0}).storage_device("head.weight")


@pytest.mark.parametrize(
    ("device_map", "main"),
    [
        ({"a": "cpu", "b": "disk"}, "cpu"),
        ({"a": "cpu", "b": 1, "c": 0}, "virtual:0"),
        ({"a": "disk", "b": "virtual:1"}, "virtual:1"),
    ],
)
def test_offloaded_modules_run_on_the_first_accelerator_of_the_map(device_map: dict[str, str], main: str) -> None:
    placement = DeviceMapLookup(device_map)
    assert placement.main_device == main
    assert placement.execution_device("a") == main


def test_the_main_device_can_be_named() -> None:
    assert DeviceMapLookup({"": "cpu"}, main_device=1).main_device == "virtual:1"
    assert DeviceMapLookup({"": "cpu"}, main_device="virtual:1").execution_device("a.weight") == "virtual:1"


def test_offloaded_modules_may_run_on_the_host_beside_an_accelerator() -> None:
    placement = DeviceMapLookup({"a": 0, "b": "cpu", "c": "disk"}, execution={"a": "cpu", "b": "cpu"})
    assert placement.execution_device("a.weight") == "virtual:0"
    assert placement.execution_device("b.weight") == "cpu"
    assert placement.execution_device("c.weight") == "virtual:0"


def test_offloaded_modules_may_run_on_another_accelerator_than_the_main_device() -> None:
    placement = DeviceMapLookup({"a": 0, "b": "cpu", "c": "disk"}, execution={"a": 1, "b": 1})
    assert placement.main_device == "virtual:0"
    assert placement.execution_device("a.weight") == "virtual:0", "resident"
    assert placement.execution_device("b.weight") == "virtual:1"
    assert placement.execution_device("c.weight") == "virtual:0"


def test_a_tied_tensor_is_seen_in_every_place() -> None:
    places = {p.name: p for p in DeviceMapLookup({"": "cpu"}).tensors(stack())}
    assert places["embed.weight"].tensor is places["head.weight"].tensor
    assert places["used"].is_buffer
