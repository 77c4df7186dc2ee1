from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bigmodel.profile.machine import probe_transfer as probe_disk
from bigmodel.profile.machine.machine import LinkSpeed
from bigmodel.profile.machine.probe_transfer import disk_rates, disk_speed, memory_rate, probe_links
from bigmodel.profile.machine.timing import QUICK

from ..clock import Clock, copied_bytes


@pytest.mark.usefixtures("accelerators")
def test_each_direction_of_a_link_is_fitted_to_a_small_and_a_large_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    there, back = LinkSpeed(1e8, 1e-3), LinkSpeed(2e7, 5e-3)

    def seconds(func: Any, args: tuple[Any, ...], *_: Any) -> float:
        nbytes = copied_bytes(func, args)
        way = there if nbytes and args[0].device.type == "virtual" else back
        return way.seconds(nbytes) if nbytes else 0.0

    with Clock(monkeypatch, seconds):
        found = probe_links(torch.device("virtual:0"), QUICK)
    for link, expected in ((found.to_device, there), (found.to_device_pageable, there), (found.to_host, back)):
        assert (link.rate, link.latency) == (pytest.approx(expected.rate), pytest.approx(expected.latency))
    assert found.disturbance >= 0


def test_the_memory_rate_is_that_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    with Clock(monkeypatch, lambda func, *_: 0.5 if func is torch.ops.aten.sum.default else 0.0):
        assert memory_rate(QUICK) == pytest.approx(QUICK.spread / 0.5)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each look at the clock is a second after the one before, so that each reading of the file takes one."""
    monkeypatch.setattr(probe_disk, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    return


@pytest.mark.slow
@pytest.mark.usefixtures("ticks")
def test_a_disk_rate_is_the_files_bytes_by_the_seconds_of_reading(tmp_path: Path) -> None:
    assert disk_rates(tmp_path, QUICK) == (QUICK.file, QUICK.file)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("refused", ["open", "preadv"])
def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real: Any = getattr(os, refused)
    direct: set[int] = set()

    def refuse_direct(first: Any, *rest: Any) -> Any:
        if first in direct or (refused == "open" and rest[0] & os.O_DIRECT):
            raise OSError(22, "no direct reading here")
        return real(first, *rest)

    monkeypatch.setattr(os, refused, refuse_direct)
    if refused == "preadv":
        opened = os.open

        def open_noted(path: Any, flags: int, *mode: int) -> int:
            descriptor = opened(path, flags, *mode)
            if flags & os.O_DIRECT:
                direct.add(descriptor)
            return descriptor

        monkeypatch.setattr(os, "open", open_noted)
    cold, warm = disk_rates(tmp_path, QUICK)
    assert min(cold, warm) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        disk_rates(tmp_path / "nowhere", QUICK)


def test_as_many_threads_read_as_the_disk_is_worth_and_cores_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 16 cores up to 8; the fewest that come within a tenth of the best."""
    rates = {2: 10.0, 4: 19.0, 8: 20.0}
    monkeypatch.setattr(probe_disk, "disk_rates", lambda folder, effort, readers: (rates[readers], 99.0))
    assert disk_speed(tmp_path, QUICK, cores=16) == (4, 19.0, 99.0)
    assert disk_speed(tmp_path, QUICK, cores=8) == (4, 19.0, 99.0)
    assert disk_speed(tmp_path, QUICK, cores=2) == (2, 10.0, 99.0)
    rates[8] = 40.0
    assert disk_speed(tmp_path, QUICK, cores=64)[0] == 8


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_the_link_to_another_accelerator_is_measured_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_disk, "_disturbance", lambda *_: 0.0)

    def seconds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
        kinds = {str(each.device) for each in args if isinstance(each, torch.Tensor)}
        return copied_bytes(func, args) / (2e9 if len(kinds & {"virtual:0", "virtual:1"}) == 2 else 1e9)

    with Clock(monkeypatch, seconds):
        found = probe_links(torch.device("virtual:0"), QUICK, torch.device("virtual:1"))
        alone = probe_links(torch.device("virtual:0"), QUICK)
    assert found.to_peer is not None
    assert found.to_peer.rate == pytest.approx(2e9)
    assert found.to_device.rate == pytest.approx(1e9)
    assert alone.to_peer is None
