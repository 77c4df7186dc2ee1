from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.profile.machine.effort import QUICK
from bigmodel.profile.machine.machine import LinkSpeed
from bigmodel.profile.machine.probe_link import memory_rate, probe_links

from ..clock import Clock, copied_bytes


@pytest.mark.usefixtures("accelerators")
def test_each_way_of_a_link_is_a_line_through_a_small_and_a_large_copy(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memory_is_read_as_fast_as_a_sum_of_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with Clock(monkeypatch, lambda func, *_: 0.5 if func is torch.ops.aten.sum.default else 0.0):
        assert memory_rate(QUICK) == pytest.approx(QUICK.spread / 0.5)
