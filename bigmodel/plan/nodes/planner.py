"""`plan_nodes`: the layers of each of several nodes, and the plan of each, with the least predicted seconds."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ...arguments import check_choice
from ...errors import BudgetError, PlanError
from ...limits import UNKNOWN_NEW_TOKENS
from ...profile import DtypeLike, Profile, meta_model, profile_model
from ...profile.machine.machine import LinkSpeed
from ...profile.machine.probe import known_machine
from ...profile.model.stage import layers_of, stage_alone, units_of_whole
from ...profile.trace.recordings import sharing_recordings
from ...sources.resolve import open_source
from ..planner import plan
from ..result.budgets import device_name, device_type_of, is_accelerator, read_budgets
from ..result.plan import Plan
from .description import Node, Nodes
from .result import Crossing, NodesPlan, Stage
from .search import Cut, best_cut, in_proportion

OBJECTIVES = ("latency", "throughput")
"""Quantities that the cut minimises: seconds of a step, or of the slowest stage."""


def plan_nodes(
    model: nn.Module | str | os.PathLike[str],
    nodes: Nodes,
    batch_size: int = 1,
    context_length: int | None = None,
    dtype: DtypeLike | None = None,
    new_tokens: int | None = None,
    objective: str = "latency",
    offload: str = "stream",
    revision: str | None = None,
) -> NodesPlan:
    """Return the plan of a causal language model over several nodes: consecutive layers on each, placed by `plan`.

    Args:
        model: a model of transformers, also on meta, which is not changed; or a folder or Hub id, of which the config
            and the headers are read.
        nodes: the hosts in the order of their stages.
        batch_size: sequences at once.
        context_length: tokens of a sequence at its end; None: a default.
        dtype: dtype that weights are loaded as; None: as stored.
        new_tokens: number of the context's tokens that are generated; None: any number.
        objective: "latency": the seconds of a step are least; "throughput": those of the slowest stage are, and each
            node is planned for the whole job.
        offload: as for `plan`.
        revision: branch, tag or commit of a Hub id.

    Raises:
        BudgetError: a node cannot hold any layers that the others leave.
        PlanError: the model cannot be cut into as many stages, or an argument is invalid.
        CheckpointError: `model` is a folder or id that holds no model.
    """
    check_choice("objective", objective, OBJECTIVES)
    whole = model if isinstance(model, nn.Module) else meta_model(open_source(model, revision), dtype or "auto")
    options = {
        "batch_size": batch_size,
        "context_length": context_length,
        "dtype": dtype if isinstance(model, nn.Module) else None,
        "new_tokens": new_tokens,
    }
    planner = _Planner(whole, nodes, options, objective, offload)
    with sharing_recordings():
        begin = planner.begin()
        cut = best_cut(begin, planner.cost, planner.held(begin))
        return planner.planned(cut)


@dataclass
class _Planner:
    """Plans stages of one model, each once.

    Attributes:
        model: the whole model.
        nodes: the hosts.
        options: arguments of `profile_model` beside the model and the type of the devices.
        objective: as of `plan_nodes`.
        offload: as of `plan`.
        found: by what a stage takes, the first layer of one that was planned, and its plan or the error.
        profiles: by what a stage takes but for its node, and the type of the devices, its profile.
    """

    model: nn.Module
    nodes: Nodes
    options: dict[str, Any]
    objective: str
    offload: str
    found: dict[Hashable, tuple[int, Plan | BudgetError]] = field(default_factory=dict)
    profiles: dict[Hashable, Profile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kinds = [_kind(self.model, index) for index in range(len(layers_of(self.model)))]

    def begin(self) -> Cut:
        """Return layers in proportion to the accelerators' budgets, or to those of hosts where there is none."""
        return in_proportion(len(self.kinds), _weights(self.nodes))

    def held(self, cut: Cut) -> list[int]:
        """Return how many layers each node holds without streaming any, from where its stage of `cut` begins, or to
        where the last one ends; 0 if not even one."""
        total = len(self.kinds)

        def streams(at: int, start: int, count: int) -> bool:
            start = total - count if at == len(cut) - 1 else start
            _, made = self._alike(self.nodes.nodes[at], start, start + count)
            return isinstance(made, BudgetError) or bool(made.streamed)

        return [
            bisect_left(range(1, total - start), True, key=lambda count: streams(at, start, count))
            for at, (start, _) in enumerate(_ranges(cut))
        ]

    def cost(self, cut: Cut) -> tuple[int, float]:
        """Return the number of layers on nodes that have no room for theirs, and the seconds that are minimised: what
        crosses the links is the same for every cut."""
        seconds = [self._seconds(at, start, stop) for at, (start, stop) in enumerate(_ranges(cut))]
        unfit = sum(count for count, each in zip(cut, seconds) if each is None)
        combined: Callable[[list[float]], float] = max if self.objective == "throughput" else sum
        return unfit, combined([0.0, *(each for each in seconds if each is not None)])

    def planned(self, cut: Cut) -> NodesPlan:
        """Return the plan of a cut.

        Raises:
            BudgetError: a stage does not fit its node.
        """
        stages: list[Stage] = []
        for at, (start, stop) in enumerate(_ranges(cut)):
            node = self.nodes.nodes[at]
            begun, made = self._alike(node, start, stop)
            if begun != start:  # a plan names its layers
                made = self._plan(node, start, stop)
            if isinstance(made, BudgetError):
                raise BudgetError(f"node {node.name!r} with layers {start} to {stop - 1} of {len(self.kinds)}: {made}")
            stages.append(Stage(node.name, start, stop, made))
        return NodesPlan(type(self.model).__name__, tuple(stages), self._crossings(stages))

    def _seconds(self, at: int, start: int, stop: int) -> float | None:
        """Return the predicted seconds of a step of layers `start` to `stop` on node `at`; None if they do not fit.

        Raises:
            PlanError: nothing is known of the speed of the node.
        """
        node = self.nodes.nodes[at]
        _, made = self._alike(node, start, stop)
        if isinstance(made, BudgetError):
            return None
        if made.prediction is None:
            raise PlanError(
                f"node {node.name!r} has devices that this machine lacks, so nothing is known of its speed: give its "
                '`machine`, the file that `bigmodel probe --json` prints there, or "nominal"'
            )
        token, after_pause = made.prediction.token, made.prediction.token_after_pause
        beside_others = self.objective == "latency" and len(self.nodes.nodes) > 1
        return after_pause if beside_others and after_pause is not None else token

    def _alike(self, node: Node, start: int, stop: int) -> tuple[int, Plan | BudgetError]:
        """Return the plan of layers of these kinds on such a node, or the error that there is none, and the first of
        the layers that were planned."""
        key = _speed_and_budgets(node), self._takes(start, stop)
        if key not in self.found:
            self.found[key] = start, self._plan(node, start, stop)
        return self.found[key]

    def _takes(self, start: int, stop: int) -> Hashable:
        """Return a value that is equal for stages that take the same bytes and seconds on equal nodes."""
        return start == 0, stop == len(self.kinds), tuple(self.kinds[start:stop])

    def _plan(self, node: Node, start: int, stop: int) -> Plan | BudgetError:
        budgets = dict(node.max_memory)
        staged = self._profile(device_type_of(read_budgets(budgets)), start, stop)
        try:
            return plan(
                replace(staged, units=units_of_whole(staged.units, start)),
                budgets,
                machine=node.machine,
                objective=self.objective,
                offload=self.offload,
            )
        except BudgetError as error:
            return error

    def _profile(self, device_type: str, start: int, stop: int) -> Profile:
        """Return the profile of a stage, whose layers are numbered from 0."""
        key = device_type, self._takes(start, stop)
        if key not in self.profiles:
            self.profiles[key] = profile_model(
                stage_alone(self.model, start, stop), device_type=device_type, **self.options
            )
        return self.profiles[key]

    def _crossings(self, stages: list[Stage]) -> tuple[Crossing, ...]:
        if len(stages) == 1:
            return ()
        embedding: Any = self.model.model.embed_tokens  # type: ignore[union-attr]
        itemsize = _itemsize(stages[0].plan, embedding.weight)
        first = stages[0].plan
        rows = first.batch_size
        new = UNKNOWN_NEW_TOKENS if first.new_tokens is None else first.new_tokens
        prompt = max(first.context_length - new, 1)
        width, vocabulary = rows * embedding.embedding_dim * itemsize, rows * embedding.num_embeddings * itemsize
        hops = [(at, at + 1, width, width * prompt) for at in range(len(stages) - 1)]
        hops.append((len(stages) - 1, 0, vocabulary, vocabulary))
        found: list[Crossing] = []
        for source, target, step, prefill in hops:
            names = stages[source].node, stages[target].node
            link = self.nodes.between(*names)
            leaves, enters = self._to_host(source, stages), self._to_host(target, stages, entering=True)
            found.append(Crossing(*names, step, prefill, link.rate, link.latency, leaves, enters))
        return tuple(found)

    def _to_host(self, at: int, stages: list[Stage], entering: bool = False) -> LinkSpeed | None:
        """Return the link between the host of a node and its accelerator, from there or `entering`; None where the host
        computes, or its speed is not known."""
        ran = [key for key in stages[at].plan.execution.values() if is_accelerator(key)]
        machine = self.nodes.nodes[at].machine or known_machine()
        if not ran or machine is None:
            return None
        links = machine.link(device_name(ran[0]))
        return links.to_device_pageable if entering else links.to_host_pageable


def _kind(model: nn.Module, index: int) -> Hashable:
    """Return a value that is equal for layers that take the same bytes and seconds."""
    layer = layers_of(model)[index]
    types = getattr(getattr(model, "config", None), "layer_types", None)
    tensors = tuple((name, tuple(each.shape), each.dtype) for name, each in layer.state_dict().items())
    return type(layer), types[index] if types else None, tensors


def _speed_and_budgets(node: Node) -> Hashable:
    """Return a value that is equal for nodes of the same budgets and speeds."""
    return tuple(node.max_memory.items()), None if node.machine is None else node.machine.key


def _ranges(cut: Cut) -> list[tuple[int, int]]:
    stops = list(accumulate(cut))
    return list(zip([0, *stops], stops))


def _weights(nodes: Nodes) -> list[float]:
    budgets = [read_budgets(dict(node.max_memory)) for node in nodes.nodes]
    sizes = [sum(size for key, size in each.items() if is_accelerator(key)) for each in budgets]
    return [float(size) for size in sizes] if all(sizes) else [float(each.get("cpu", 1)) for each in budgets]


def _itemsize(made: Plan, weight: torch.Tensor) -> int:
    """Return the bytes of an element of hidden states."""
    dtype = getattr(torch, made.dtype, None) if made.dtype is not None else None
    return int((dtype if isinstance(dtype, torch.dtype) else weight.dtype).itemsize)
