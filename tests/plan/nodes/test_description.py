from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigmodel.errors import PlanError
from bigmodel.plan import parse_nodes, read_nodes
from bigmodel.profile.machine.machine import LinkSpeed, dump, nominal_machine


def described(**changes: Any) -> dict[str, Any]:
    """Return the description of two nodes; `changes` replaces entries."""
    nodes = [{"name": name, "max_memory": {"0": "24GB", "cpu": "64GB"}} for name in ("a", "b")]
    return {"nodes": nodes, "link": {"rate": "10GB", "latency": 1e-5}, **changes}


def test_a_file_gives_budgets_machines_and_links(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(dump(nominal_machine()))
    content = described(links=[{"source": "b", "target": "a", "rate": "1GB"}])
    content["nodes"][0]["machine"] = "a.json"
    (tmp_path / "nodes.json").write_text(json.dumps(content))
    nodes = read_nodes(tmp_path / "nodes.json")
    assert nodes.nodes[0].max_memory == {0: "24GB", "cpu": "64GB"}
    assert nodes.nodes[0].machine == nominal_machine()
    assert nodes.nodes[1].machine is None
    assert nodes.between("a", "b") == nodes.between("b", "a") == LinkSpeed(1e9)


def test_links_that_are_not_named_are_those_of_all() -> None:
    assert parse_nodes(described()).between("a", "b") == LinkSpeed(1e10, 1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": []}, "nodes is empty"),
        ({"nodes": [{"name": "a"}]}, r"nodes\[0\] has no 'max_memory'"),
        ({"nodes": [{"name": "a", "max_memory": {}}]}, r"nodes\[0\].max_memory"),
        ({"nodes": [{"name": "a", "max_memory": {"cpu": 1}}] * 2}, "two nodes are named 'a'"),
        ({"nodes": [{"name": "a", "max_memory": {"cpu": 1}, "gpu": 1}]}, "unknown entry 'gpu'"),
        ({"nodes": [{"name": "a", "max_memory": {"cpu": 1}, "machine": "none.json"}]}, "none.json cannot be read"),
        ({"link": {"rate": "fast"}}, "link.rate"),
        ({"link": {"rate": 0}}, "link.rate is 0"),
        ({"link": {"rate": 1, "latency": -1}}, "link.latency is -1"),
        ({"links": [{"source": "a", "target": "c", "rate": 1}]}, "names the node 'c'"),
        ({"links": {}}, "links is {}; give a list"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_nodes(described(**changes))


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json"):
        read_nodes(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PlanError, match=r"bad\.json"):
        read_nodes(tmp_path / "bad.json")
