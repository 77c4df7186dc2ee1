from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.errors import NodeLostError
from bigmodel.nodes.messages import Peer
from bigmodel.profile.machine.machine import LinkSpeed


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("rows", [0, 1, 4000])
def test_values_and_tensors_arrive_as_they_were(ends: tuple[socket.socket, socket.socket], rows: int) -> None:
    tensors = {
        "hidden": torch.randn(rows, 48).to(torch.bfloat16)[:, ::2],
        "ids": torch.arange(rows),
        "flag": torch.tensor(True),
    }
    sends = threading.Thread(target=Peer(1, "b", ends[0]).send, args=({"past": 3, "dropped": [1]}, tensors))
    sends.start()
    values, found = Peer(0, "a", ends[1]).receive()
    sends.join()
    assert values == {"past": 3, "dropped": [1]}
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_message_takes_as_long_as_its_link(ends: tuple[socket.socket, socket.socket]) -> None:
    peer = Peer(1, "b", ends[0], LinkSpeed(1e6, 0.01))
    began = time.perf_counter()
    peer.send({}, {"hidden": torch.zeros(2500)})
    assert time.perf_counter() - began >= 0.02


@pytest.mark.virtual_only("an accelerator of a set speed")
def test_its_link_begins_when_an_accelerator_has_computed_it(ends: tuple[socket.socket, socket.socket]) -> None:
    virtual.enable(1, flops=1e6)
    try:
        peer = Peer(1, "b", ends[0], LinkSpeed(1e6, 0.05))
        left, right = torch.ones(1, 100).to("virtual:0"), torch.ones(100, 250).to("virtual:0")
        began = time.perf_counter()
        peer.send({}, {"hidden": left @ right})  # 50 ms of computing, and then 51 of the link
        assert time.perf_counter() - began >= 0.1
    finally:
        virtual.disable()


def test_a_process_that_is_gone_is_named(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b"half")
    ends[0].close()
    peer = Peer(2, "c", ends[1])
    with pytest.raises(NodeLostError, match=r"node 'c' \(rank 2\) no longer answers"):
        peer.receive()
    with pytest.raises(NodeLostError, match="no longer answers"):
        for _ in range(2):
            peer.send({}, {"hidden": torch.zeros(100_000)})
