import threading

import pytest
import torch

from bigmodel.devices import copy_stream
from bigmodel.dispatch.transfer.copy_link import Link
from bigmodel.dispatch.weights.stats import StreamStats

HOST = torch.device("cpu")


def test_copies_run_in_order_and_their_time_is_counted() -> None:
    stats = StreamStats()
    link = Link(copy_stream(HOST), HOST, stats)
    gate, done = threading.Event(), []

    def first() -> None:
        assert gate.wait(30)
        done.append(1)

    link.copy(first)
    last = link.copy(lambda: done.append(2))
    assert done == []
    gate.set()
    last.wait()
    assert done == [1, 2]
    assert stats.seconds_on_link > 0


def test_time_counts_for_a_copy_that_fails_too() -> None:
    stats = StreamStats()
    event = Link(copy_stream(HOST), HOST, stats).copy(lambda: torch.zeros(2).copy_(torch.zeros(3)) and None)
    with pytest.raises(RuntimeError, match="size"):
        event.wait()
    assert stats.seconds_on_link > 0
