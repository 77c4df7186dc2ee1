import threading

import pytest

from bigmodel.dispatch.weights import stats as module
from bigmodel.dispatch.weights.stats import StreamStats, together


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


def test_reading_by_several_at_once_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stats = StreamStats()
    with stats.reading():
        clock.now = 1
        with stats.reading():
            clock.now = 3
    clock.now = 10
    with stats.reading():
        clock.now = 11
    assert stats.seconds_reading == 4


def test_rates_are_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stats = StreamStats()
    assert (stats.hit_rate, stats.link_busy) == (0, 0)
    stats.hits, stats.misses = 3, 1
    stats.add(on_link=2.0)
    clock.now = 8
    assert stats.as_dict()["hit_rate"] == 0.75
    assert stats.as_dict()["link_busy"] == 0.25
    stats.reset()
    assert set(stats.as_dict().values()) == {0}


def test_threads_may_count_together() -> None:
    stats = StreamStats()

    def count() -> None:
        for _ in range(1000):
            stats.add(from_disk=1, fetches=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.bytes_from_disk == stats.fetches == 4000


def test_bytes_that_reach_one_device_in_several_ways_are_added_up() -> None:
    one, other = StreamStats(), StreamStats()
    one.add(from_ram=3, fetches=1)
    one.hits, one.misses = 1, 1
    other.add(from_disk=5, fetches=2)
    other.hits, other.misses = 2, 0
    total = together([one, other])
    assert (total["bytes_from_ram"], total["bytes_from_disk"], total["fetches"]) == (3, 5, 3)
    assert total["hit_rate"] == 0.75
    assert together([one])["hit_rate"] == one.hit_rate
