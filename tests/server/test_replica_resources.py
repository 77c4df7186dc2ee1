"""Every replica finds a place, and takes as much as all can have alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.server.replica_resources import Machine, resources


@pytest.mark.parametrize(
    ("machines", "replicas", "expected"),
    [
        ([Machine(2)], 2, {"num_cpus": 1}),
        ([Machine(8)], 2, {"num_cpus": 4}),
        ([Machine(8), Machine(2)], 2, {"num_cpus": 4}),  # both on the large one
        ([Machine(4), Machine(4)], 2, {"num_cpus": 4}),
        ([Machine(16, 4)], 2, {"num_cpus": 8, "num_gpus": 2}),
        ([Machine(16, 1), Machine(16, 1)], 2, {"num_cpus": 16, "num_gpus": 1}),  # one on each machine
        ([Machine(16, 1)], 2, {"num_cpus": 1, "num_gpus": 0.5}),
        ([Machine(16, 1), Machine(16, 1)], 3, {"num_cpus": 1, "num_gpus": 0.5}),
    ],
)
def test_a_cluster_is_shared_alike(machines: list[Machine], replicas: int, expected: dict[str, float]) -> None:
    assert resources(machines, replicas) == expected


@given(
    st.lists(st.builds(Machine, st.integers(8, 64), st.integers(0, 8)), min_size=1, max_size=5),
    st.integers(1, 8),
)
def test_all_find_a_place(machines: list[Machine], replicas: int) -> None:
    share = resources(machines, replicas)
    cpus, gpus = share["num_cpus"], share.get("num_gpus", 0)
    places = sum(
        int(min(machine.cpus // cpus, machine.gpus / gpus + 1e-9 if gpus else machine.cpus)) for machine in machines
    )
    assert places >= replicas
