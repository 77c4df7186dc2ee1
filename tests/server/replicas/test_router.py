"""Every replica is a candidate at once, in an order that favours none."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from bigmodel.server.replicas.router import FewestRequests


def test_all_replicas_are_one_rank_in_a_random_order() -> None:
    router = FewestRequests.__new__(FewestRequests)  # made by Ray's proxy, with parts that choosing needs none of
    replicas = list("abcd")
    first = set()
    for _ in range(200):
        (rank,) = asyncio.run(router.choose_replicas(replicas))  # type: ignore[arg-type]
        assert sorted(rank) == replicas
        first.add(rank[0])
    assert first == set(replicas)
