import psutil
import pytest
import torch

from bigmodel.devices import (
    PeakMeter,
    free_memory_bytes,
    get_max_memory,
    max_memory_allocated,
    memory_allocated,
    reset_peak_memory,
    virtual,
)
from bigmodel.devices.memory import (
    NOMINAL_CONTEXT,
    NOMINAL_WORKSPACE,
    CachingMemory,
    available_bytes,
    caching_memory,
    physical_bytes,
    total_host_bytes,
)
from bigmodel.errors import DeviceError, SizeError

from .conftest import Ended

MB = 2**20


@pytest.mark.long
@pytest.mark.slow
def test_the_host_is_measured_by_the_kernels_high_water_mark(own_process: Ended) -> None:
    # In a process of its own: in a large one the kernel may take pages away meanwhile.
    found = own_process.found
    assert found["grown"] > 60 * MB
    assert found["peak"] >= found["grown"] - 4 * MB
    assert found["peak after reset"] < found["grown"] - 32 * MB


@pytest.mark.usefixtures("accelerators")
def test_an_accelerator_counts_what_tensors_hold() -> None:
    virtual.configure(0, 10 * MB)
    a = torch.ones(MB, dtype=torch.uint8, device="virtual:0")
    b = a + 1
    assert memory_allocated(0) == 2 * MB
    assert free_memory_bytes(0) == 8 * MB
    del b
    assert memory_allocated(0) == MB
    assert max_memory_allocated(0) == 2 * MB
    reset_peak_memory(0)
    assert max_memory_allocated(0) == MB
    assert memory_allocated(1) == 0


def test_the_disk_has_no_memory_of_its_own() -> None:
    with pytest.raises(DeviceError):
        memory_allocated("meta")


@pytest.mark.usefixtures("accelerators")
def test_without_budgets_the_machine_is_asked() -> None:
    virtual.configure(0, "1MiB")
    virtual.configure(1, "2MiB")
    held = torch.empty(2**18, dtype=torch.uint8, device="virtual:0")
    budgets = get_max_memory()
    assert list(budgets) == [0, 1, "cpu"]
    assert budgets[0] == 2**20 - held.nbytes
    assert budgets[1] == 2**21
    assert budgets["cpu"] > 0


@pytest.mark.usefixtures("accelerators")
def test_budgets_take_every_spelling_and_come_back_in_order() -> None:
    given = {"disk": "1TB", "cpu": "10G", torch.device("virtual:1"): "2MiB", 0: 5}
    assert list(get_max_memory(given).items()) == [(0, 5), (1, 2 * 2**20), ("cpu", 10**10), ("disk", 10**12)]


@pytest.mark.usefixtures("accelerators")
def test_a_device_named_twice_is_refused() -> None:
    with pytest.raises(SizeError, match="twice"):
        get_max_memory({0: 1, "virtual:0": 2})


def test_a_bad_budget_names_the_device() -> None:
    with pytest.raises(SizeError, match=r"max_memory\['cpu'\].*'much'"):
        get_max_memory({"cpu": "much"})
    with pytest.raises(DeviceError, match="gpu"):
        get_max_memory({"gpu": 1})


@pytest.mark.usefixtures("accelerators")
def test_a_device_the_machine_lacks_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert get_max_memory({7: 100})[7] == 100
    assert "device 7" in caplog.text


@pytest.mark.parametrize("given", ["cpu=8GiB", 8, [("cpu", 8)], True])
def test_budgets_that_are_no_mapping_are_refused(given: object) -> None:
    with pytest.raises(SizeError, match="give budgets by device"):
        get_max_memory(given)  # type: ignore[arg-type]


def test_a_peak_meter_measures_what_is_taken_beyond_the_start(accelerators: None) -> None:
    held = torch.empty(1000, dtype=torch.uint8, device="virtual:0")
    meter = PeakMeter("virtual:0")
    assert meter.grown() == 0
    more = torch.empty(300, dtype=torch.uint8, device="virtual:0")
    del more
    assert meter.grown() == 300
    assert max_memory_allocated("virtual:0") == held.nbytes + 300


@pytest.mark.usefixtures("accelerators")
def test_what_a_device_takes_beside_tensors_is_known_of_those_that_cache() -> None:
    virtual.enable(1, caching=virtual.Caching(context=100, workspace=200))
    assert caching_memory("virtual:0") == CachingMemory(workspace=200, context=100)
    virtual.enable(1)
    assert caching_memory("virtual:0") is None
    assert caching_memory("virtual:5") is None
    assert caching_memory("cpu") is None
    assert caching_memory("cuda:0") == CachingMemory(NOMINAL_WORKSPACE, NOMINAL_CONTEXT)


def test_host_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    total = physical_bytes()
    assert 0 < available_bytes() <= total

    def missing() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", missing)
    assert physical_bytes() == pytest.approx(total, rel=0.01)
    assert 0 < available_bytes() <= total
    assert 0 < free_memory_bytes("cpu") <= total
    assert 0 < total_host_bytes() <= total
