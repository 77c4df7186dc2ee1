from __future__ import annotations

import pytest
import torch

from bigmodel.checkpoint.device_lookup import DeviceLookup
from bigmodel.errors import DeviceError, DeviceMapError


def test_the_longest_matching_name_decides() -> None:
    lookup = DeviceLookup({"": "disk", "layers": "cpu", "layers.1": "disk", "layers.1.bias": torch.device("cpu")})
    assert lookup.find("embed.weight") == "disk"
    assert lookup.find("layers.0.weight") == "cpu"
    assert lookup.find("layers.1.weight") == "disk"
    assert lookup.find("layers.1.bias") == "cpu"
    assert lookup.find("layers.10.weight") == "cpu", "a name is a prefix only up to a dot"


def test_disk_tensors_lie_on_the_host() -> None:
    lookup = DeviceLookup({"a": "disk", "b": "cpu"})
    assert lookup.torch_device("a.weight") == torch.device("cpu")
    assert lookup.torch_device("b") == torch.device("cpu")


def test_a_map_that_covers_too_little_names_what_it_leaves_out() -> None:
    lookup = DeviceLookup({"layers": "cpu"})
    lookup.check(["layers.0.weight", "layers"])
    with pytest.raises(DeviceMapError, match=r"no device for embed\.weight and 1 more"):
        lookup.check(["layers.0.weight", "embed.weight", "head.weight"])


def test_unknown_devices_are_refused_at_once() -> None:
    with pytest.raises(DeviceError, match="'drum'"):
        DeviceLookup({"": "drum"})
