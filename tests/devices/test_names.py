import pytest
import torch

from bigmodel.devices import accelerators as present
from bigmodel.devices import device_key, is_accelerator, normalize_device, torch_device, virtual
from bigmodel.errors import DeviceError


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("cpu", "cpu"),
        ("disk", "disk"),
        ("cuda", "cuda:0"),
        ("cuda:3", "cuda:3"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("cpu"), "cpu"),
        ("mps", "mps"),
        ("mps:0", "mps"),
    ],
)
def test_a_device_has_one_name(given: object, name: str) -> None:
    assert normalize_device(given) == name  # type: ignore[arg-type]


@pytest.mark.usefixtures("accelerators")
def test_numbers_count_the_accelerators() -> None:
    assert present() == ["virtual:0", "virtual:1"]
    assert normalize_device(1) == normalize_device("1") == "virtual:1"
    assert device_key("virtual:1") == 1
    assert device_key("cuda:1") == "cuda:1"
    assert torch_device(1) == torch.device("virtual:1")


@pytest.mark.parametrize("bad", ["gpu", "", "cuda:x", True, -1])
def test_unknown_devices_are_refused(bad: object) -> None:
    with pytest.raises(DeviceError):
        normalize_device(bad)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_a_number_without_accelerators_says_what_to_use() -> None:
    virtual.disable()
    with pytest.raises(DeviceError, match="this machine has none; use 'cpu' or 'disk'"):
        normalize_device(0)


def test_disk_lies_on_the_host_and_is_no_accelerator() -> None:
    assert torch_device("disk") == torch.device("cpu")
    assert not is_accelerator("disk")
    assert not is_accelerator("cpu")
    assert is_accelerator("cuda:0")


def test_a_number_that_pytorch_would_wrap_is_refused() -> None:
    assert normalize_device("cuda:127") == "cuda:127"
    with pytest.raises(DeviceError, match="'cuda:300' is not a device: 300 is past the last number of one, 127"):
        normalize_device("cuda:300")


@pytest.mark.parametrize("thing", [None, 1.5, b"cpu", ("cpu",), torch.float32])
def test_unknown_devices_are_refused_with_their_type(thing: object) -> None:
    with pytest.raises(DeviceError, match=f"a {type(thing).__name__} is not a device"):
        normalize_device(thing)  # type: ignore[arg-type]


@pytest.mark.parametrize(("initialized", "name"), [(False, "cuda:0"), (True, "cuda:2")])
def test_cuda_without_a_number_is_the_current_device(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, name: str
) -> None:
    """Asking for the current device initialises CUDA, after which no forked process could use it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert normalize_device("cuda") == normalize_device(torch.device("cuda")) == name
    assert normalize_device("cuda:1") == "cuda:1"


def test_looking_for_cuda_does_not_keep_forked_processes_from_using_it() -> None:
    """With this setting PyTorch asks NVML, and not CUDA's driver, which does not survive a fork."""
    assert torch.cuda._nvml_based_avail()
