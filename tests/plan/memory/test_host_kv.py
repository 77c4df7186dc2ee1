"""Profiles of models whose keys and values lie on the host."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.plan.memory import host_kv
from bigmodel.plan.memory.host_kv import MOST_KNOWN, with_kv_on_host
from bigmodel.profile import profile
from bigmodel.profile.trace.ledger import replay
from tests.plan.machines import llama_profile

pytestmark = pytest.mark.usefixtures("accelerators")


@pytest.mark.slow
def test_what_differs_in_the_tokens_that_ram_holds_shares_traces_and_their_peaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = llama_profile(64, 32, num_hidden_layers=4)
    units = [index for index, nbytes in enumerate(of.kv_cache) if nbytes][:2]
    replayed: list[Any] = []
    monkeypatch.setattr(profile, "replay", lambda trace, *args: (replayed.append(trace), replay(trace, *args))[1])
    some, fewer = with_kv_on_host(of, units), with_kv_on_host(of, units, in_ram=8)
    assert [phase.trace for phase in fewer.phases] == [phase.trace for phase in some.phases]
    peaks = some.dynamic_peaks({}, main=0)
    assert replayed
    replayed.clear()
    assert fewer.dynamic_peaks({}, main=0) == peaks
    assert not replayed
    assert fewer.dynamic_peaks({}, main="cpu").keys() == {"cpu"}
    assert replayed
    assert peaks[0] < of.dynamic_peaks({}, main=0)[0]


@pytest.mark.slow
def test_traces_of_the_last_sets_of_units_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    of = llama_profile(64, 32, num_hidden_layers=4)
    units = [index for index, nbytes in enumerate(of.kv_cache) if nbytes]
    made: list[frozenset[int]] = []
    make = host_kv._without_kept
    monkeypatch.setattr(host_kv, "_without_kept", lambda trace, kept: (made.append(kept), make(trace, kept))[1])
    for count in range(len(units) + 1):
        with_kv_on_host(of, units[:count])
    assert made
    assert len(units) < MOST_KNOWN
    made.clear()
    with_kv_on_host(of, units[:2])
    assert not made
    for number in range(MOST_KNOWN):
        with_kv_on_host(of, [len(of.units) + number])
    made.clear()
    with_kv_on_host(of, units[:2])
    assert made
