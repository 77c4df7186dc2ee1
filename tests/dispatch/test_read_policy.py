"""Whether weights are read past the page cache."""

from __future__ import annotations

import pytest

from bigmodel.dispatch import read_policy
from bigmodel.dispatch.read_policy import ReadPolicy


def policy(nbytes: int, free: int, monkeypatch: pytest.MonkeyPatch) -> ReadPolicy:
    monkeypatch.setattr(read_policy, "free_memory_bytes", lambda device: free)
    return ReadPolicy(nbytes)


def test_what_fits_into_memory_is_read_through_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = policy(100, 1000, monkeypatch)
    assert not any(fits.bypasses(cached=False) for _ in range(100))


def test_what_is_cached_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not policy(1000, 100, monkeypatch).bypasses(cached=True)


@pytest.mark.parametrize("direct_is_faster", [True, False])
def test_what_does_not_fit_is_read_the_faster_way(direct_is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    large = policy(1000, 100, monkeypatch)
    chosen = []
    for _ in range(10 * ReadPolicy.RETRY):
        bypass = large.bypasses(cached=False)
        chosen.append(bypass)
        large.record(bypass, 100, 1.0 if bypass == direct_is_faster else 2.0)
    later = chosen[2 * ReadPolicy.RETRY :]
    assert later.count(direct_is_faster) == len(later) - 8
