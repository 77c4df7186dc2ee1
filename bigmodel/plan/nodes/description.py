"""The nodes that a model is spread over: budgets of each, and the links between them. Read from a JSON file:

    {
      "nodes": [
        {"name": "a", "max_memory": {"0": "80GB", "cpu": "500GB"}, "machine": "a.json"},
        {"name": "b", "max_memory": {"0": "24GB", "cpu": "64GB"}}
      ],
      "link": {"rate": "12.5GB", "latency": 2e-5},
      "links": [{"source": "a", "target": "b", "rate": "3GB"}]
    }

`max_memory` is as `get_max_memory` takes it. `machine` is what `bigmodel probe --json` printed on that node, a path
from the file's folder, or "nominal". `link` is that of all pairs, `links` are those of single ones, in both directions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...devices import DeviceLike, parse_size
from ...errors import PlanError, SizeError
from ...profile.machine.machine import LinkSpeed, MachineProfile, load, nominal_machine

NOMINAL = "nominal"


@dataclass(frozen=True)
class Node:
    """One host.

    Attributes:
        name: its name, which no other has.
        max_memory: budgets by device, as `plan` takes them.
        machine: its measured speeds; None: those of this machine.
    """

    name: str
    max_memory: Mapping[DeviceLike, int | str]
    machine: MachineProfile | None = None


@dataclass(frozen=True)
class Nodes:
    """Hosts in the order of their stages, and the links between them.

    Attributes:
        nodes: the hosts; the first has the embedding and the inputs, the last one the head.
        link: link of two hosts that `links` does not name.
        links: links by the names of their two ends, in either order.
    """

    nodes: tuple[Node, ...]
    link: LinkSpeed
    links: Mapping[tuple[str, str], LinkSpeed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names:
            raise PlanError("nodes is empty: give at least one")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlanError(f"two nodes are named {twice[0]!r}: give each a name of its own")
        for pair in self.links:
            for name in pair:
                if name not in names:
                    raise PlanError(f"a link names the node {name!r}, and the nodes are {', '.join(names)}")

    def between(self, source: str, target: str) -> LinkSpeed:
        """Return the link of two nodes."""
        return self.links.get((source, target)) or self.links.get((target, source)) or self.link


def read_nodes(path: str | os.PathLike[str]) -> Nodes:
    """Return the nodes that a JSON file describes.

    Raises:
        PlanError: the file cannot be read, or is no description; the message names the entry.
    """
    file = Path(path)
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{file}: the nodes cannot be read ({error})") from error
    return parse_nodes(content, file.parent, str(file))


def parse_nodes(content: object, folder: Path = Path(), source: str = "nodes") -> Nodes:
    """Return the nodes in the content of such a file.

    Args:
        content: what was in the JSON.
        folder: folder that paths of machines are relative to.
        source: what messages call it.

    Raises:
        PlanError: it is no description; the message names the entry.
    """
    fields = _fields(content, source, required=("nodes", "link"), optional=("links",))
    nodes = tuple(
        _node(entry, folder, f"{source}: nodes[{at}]") for at, entry in enumerate(_list(fields, "nodes", source))
    )
    links: dict[tuple[str, str], LinkSpeed] = {}
    for at, entry in enumerate(_list(fields, "links", source)):
        where = f"{source}: links[{at}]"
        link = _fields(entry, where, required=("source", "target", "rate"), optional=("latency",))
        pair = (_text(link["source"], f"{where}.source"), _text(link["target"], f"{where}.target"))
        links[pair] = _link(link, where)
    both = _fields(fields["link"], f"{source}: link", required=("rate",), optional=("latency",))
    return Nodes(nodes, _link(both, f"{source}: link"), links)


def _node(entry: object, folder: Path, where: str) -> Node:
    fields = _fields(entry, where, required=("name", "max_memory"), optional=("machine",))
    budgets = fields["max_memory"]
    if not isinstance(budgets, dict) or not budgets:
        raise PlanError(f"{where}.max_memory is {budgets!r}; give bytes by device, as {{'0': '24GB', 'cpu': '64GB'}}")
    keys: dict[DeviceLike, int | str] = {int(key) if key.isdecimal() else key: size for key, size in budgets.items()}
    return Node(_text(fields["name"], f"{where}.name"), keys, _machine(fields.get("machine"), folder, where))


def _machine(given: object, folder: Path, where: str) -> MachineProfile | None:
    if given is None:
        return None
    name = _text(given, f"{where}.machine")
    if name == NOMINAL:
        return nominal_machine()
    try:
        return load((folder / name).read_text())
    except OSError as error:
        raise PlanError(f"{where}.machine: {folder / name} cannot be read ({error.strerror})") from error


def _link(fields: Mapping[str, Any], where: str) -> LinkSpeed:
    try:
        rate = parse_size(fields["rate"])
    except SizeError as error:
        raise PlanError(f"{where}.rate: {error}; give bytes per second, as '12.5GB'") from error
    latency = fields.get("latency", 0.0)
    if isinstance(latency, bool) or not isinstance(latency, (int, float)) or not 0 <= latency < float("inf"):
        raise PlanError(f"{where}.latency is {latency!r}; give seconds, as 2e-5")
    if rate <= 0:
        raise PlanError(f"{where}.rate is 0; give bytes per second, as '12.5GB'")
    return LinkSpeed(float(rate), float(latency))


def _fields(content: object, where: str, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise PlanError(f"{where} is {content!r}; give an object with {', '.join(required)}")
    for name in required:
        if name not in content:
            raise PlanError(f"{where} has no {name!r}")
    unknown = sorted(set(content) - {*required, *optional})
    if unknown:
        raise PlanError(f"{where} has the unknown entry {unknown[0]!r}; known are {', '.join((*required, *optional))}")
    return content


def _list(fields: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = fields.get(name, [])
    if not isinstance(found, list):
        raise PlanError(f"{where}: {name} is {found!r}; give a list")
    return found


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise PlanError(f"{where} is {value!r}; give a text")
    return value
