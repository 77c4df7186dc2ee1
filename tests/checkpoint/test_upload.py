"""Tensors reach accelerators beside the reads of others: through pinned memory, in pieces, by several threads,
or by the thread of a copy stream."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigmodel.checkpoint import upload
from bigmodel.checkpoint.upload import Uploads
from bigmodel.devices import streams, virtual
from bigmodel.devices.virtual.link import VirtualLink
from bigmodel.plan.memory.staging import StagingMemory
from tests.accelerators import at

pytestmark = pytest.mark.usefixtures("every_accelerator")

without_streams = pytest.mark.virtual_only("has no streams")
MEMORY = StagingMemory(2**18, 4)


def sources() -> list[torch.Tensor]:
    return [torch.arange(float(count)).reshape(-1, 5) for count in (5, 3000, 500, 10)]


@pytest.mark.parametrize("memory", [MEMORY, StagingMemory(512, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_a_plain_copy(memory: StagingMemory, dtype: torch.dtype) -> None:
    with Uploads(bytes_ahead=8000, memory=memory) as uploads:
        found = [uploads.copy(source, dtype, torch.device(at(0))) for source in sources()]
    for target, source in zip(found, sources(), strict=True):
        assert torch.equal(target.cpu(), source.to(dtype))


@pytest.mark.virtual_only("counts waits of the host")
def test_no_copy_holds_the_host_and_pinned_memory_is_let_go() -> None:
    before, reserved = virtual.host_waits(), virtual.pinned_memory.reserved
    with Uploads(2**20, MEMORY) as uploads:
        found = [uploads.copy(source, torch.float32, torch.device(at(0))) for source in sources()]
    assert virtual.host_waits().since(before).copies_to_device == 0
    del uploads
    assert virtual.pinned_memory.reserved == reserved
    assert torch.equal(found[1].cpu(), sources()[1])


def test_a_tensor_may_be_let_go_while_its_copy_is_under_way() -> None:
    with Uploads(1, MEMORY) as uploads:
        uploads.copy(torch.ones(1000), torch.float32, torch.device(at(0)))  # it is queued on return
        gc.collect()
        torch.zeros(1000, device=at(0))


@pytest.mark.virtual_only("sees when copies are queued")
def test_reading_goes_on_only_while_few_bytes_wait_for_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def held(*arguments: object) -> None:
        begun.set()
        go_on.wait()

    monkeypatch.setattr(upload.DeviceUploads, "_copy", held)
    with Uploads(100, MEMORY) as uploads:
        uploads.copy(torch.ones(25), torch.float32, torch.device(at(0)))
        begun.wait()
        second = threading.Thread(target=uploads.copy, args=(torch.ones(1), torch.float32, torch.device(at(0))))
        second.start()
        assert second.is_alive()
        go_on.set()
        second.join()


def test_the_error_of_a_copy_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> None:
        raise OSError("cannot be read")

    monkeypatch.setattr(upload.DeviceUploads, "_copy", failing)
    with pytest.raises(OSError, match="cannot be read"), Uploads(2**20, MEMORY) as uploads:
        uploads.copy(torch.ones(3), torch.float32, torch.device(at(0)))


def test_what_pinned_memory_does_not_help_is_left_to_others() -> None:
    uploads = Uploads(1, MEMORY)
    device = torch.device(at(0))
    assert uploads.takes(torch.ones(2, 3), device)
    assert not uploads.takes(torch.ones(2, 3).t(), device)
    assert not uploads.takes(torch.ones(0), device)
    assert not uploads.takes(torch.ones(2), torch.device("cpu"))
    assert not Uploads(1, StagingMemory(0, 0)).takes(torch.ones(2, 3), device)


@pytest.mark.virtual_only("schedules")
@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.one_of(st.none(), st.integers(0, 2**16)),
    late=st.booleans(),
    memory=st.sampled_from([MEMORY, StagingMemory(512, 6)]),
)
def test_values_are_the_same_however_late_copies_arrive(seed: int | None, late: bool, memory: StagingMemory) -> None:
    virtual.enable(count=2, strict=True, seed=seed, late_compute=late)
    with Uploads(4000, memory) as uploads:
        devices = [torch.device(at(index % 2)) for index in range(len(sources()))]
        found = [uploads.copy(*each) for each in zip(sources(), [torch.float32] * 4, devices, strict=True)]
    assert all(torch.equal(target.cpu(), source) for target, source in zip(found, sources(), strict=True))


@without_streams
def test_copies_to_a_device_without_streams_follow_each_other_beside_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    virtual.enable(count=1, strict=False)
    own, seen = streams.copy_ready_since, []

    def noted() -> float | None:
        seen.append((threading.current_thread() is threading.main_thread(), own() is None))
        return own()

    monkeypatch.setattr(sys.modules[VirtualLink.__module__], "copy_ready_since", noted)
    with Uploads(2**20, MEMORY) as uploads:
        assert uploads.takes(torch.ones(2, 3).t(), torch.device(at(0)))
        found = [
            uploads.copy(torch.arange(20000.0), dtype, torch.device(at(0))) for dtype in (torch.float32, torch.bfloat16)
        ]
    assert seen == [(False, False)] * 2
    assert all(torch.equal(each.cpu(), torch.arange(20000.0).to(each.dtype)) for each in found)


@without_streams
def test_after_an_error_copies_that_have_not_begun_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual.enable(count=1, strict=False)
    go_on, begun, copied = threading.Event(), threading.Event(), []
    own = VirtualLink.transfer

    def held(*arguments: Any, **options: Any) -> None:
        begun.set()
        go_on.wait(5)
        copied.append(own(*arguments, **options))

    monkeypatch.setattr(VirtualLink, "transfer", held)
    uploads = Uploads(2**20, MEMORY)
    with pytest.raises(ValueError, match="elsewhere"), uploads:
        for _ in range(3):
            uploads.copy(torch.ones(20000), torch.float32, torch.device(at(0)))
        begun.wait()
        threading.Timer(0.1, go_on.set).start()
        raise ValueError("elsewhere")
    assert len(copied) == 1


@without_streams
def test_the_error_of_a_copy_to_a_device_without_streams_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual.enable(count=1, strict=False)

    def failing(*arguments: object, **options: object) -> None:
        raise OSError("cannot be read")

    monkeypatch.setattr(VirtualLink, "transfer", failing)
    with pytest.raises(OSError, match="cannot be read"), Uploads(2**20, MEMORY) as uploads:
        uploads.copy(torch.ones(20000), torch.float32, torch.device(at(0)))
