from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from bigmodel.errors import BudgetError, PlanError
from bigmodel.plan import Node, Nodes, NodesPlan, plan_nodes
from bigmodel.plan.result.plan import Prediction
from bigmodel.profile.machine.machine import LinkSpeed, nominal_machine

from ...profile.models import tiny_llama
from ..machines import machine

LINK = LinkSpeed(1e6, 1e-3)
SHAPE: Any = {"context_length": 32, "new_tokens": 8}


def nodes_of(*budgets: str, host: float = 1e-9) -> Nodes:
    """Return nodes of one host each, with these budgets."""
    return Nodes(
        tuple(Node(f"n{at}", {"cpu": budget, "disk": 0}, machine(host=host)) for at, budget in enumerate(budgets)), LINK
    )


def llama(layers: int = 4) -> LlamaForCausalLM:
    model = tiny_llama(num_hidden_layers=layers)
    assert isinstance(model, LlamaForCausalLM)
    return model


@pytest.mark.slow
def test_stages_hold_all_layers_once_and_budgets_hold() -> None:
    model = llama()
    whole = {name for name, _ in model.named_parameters()}
    made = plan_nodes(model, nodes_of("10MB", "10MB", "10MB"), **SHAPE)
    assert next((stage.start, stage.stop) for stage in made.stages)[0] == 0
    assert [one.stop for one in made.stages[:-1]] == [one.start for one in made.stages[1:]]
    assert made.stages[-1].stop == 4
    names = [name for stage in made.stages for name in stage.plan.device_map]
    for name in whole:
        assert sum(name.startswith(f"{unit}.") for unit in names) == 1
    assert {name for name, _ in model.named_parameters()} == whole


@pytest.mark.slow
def test_the_step_is_that_of_all_stages_and_links() -> None:
    made = plan_nodes(llama(), nodes_of("10MB", "10MB"), **SHAPE)
    config = llama().config
    assert [crossing.step_bytes for crossing in made.crossings] == [4 * config.hidden_size, 4 * config.vocab_size]
    assert made.crossings[0].prefill_bytes == 24 * 4 * config.hidden_size
    stages = [stage.plan.prediction.token for stage in made.stages if stage.plan.prediction is not None]
    links = 2 * 1e-3 + (4 * config.hidden_size + 4 * config.vocab_size) / 1e6
    assert made.step == pytest.approx(sum(stages) + links)
    assert made.prefill is not None
    assert made.slowest == max(*stages, *(crossing.step for crossing in made.crossings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "step"),
    [
        ((5.0, 5.0), 0.4 + 5.0),  # the first node's link is done long before its turn
        ((0.5, 0.5), (1.0 - 0.5) + 0.5),  # and here it goes on for half of what it has to fetch
        ((1.0, 0.4), 2 * (1.0 - 0.4)),
        ((0.5, None), (1.0 - 0.5) + 0.5),
    ],
)
def test_links_go_on_while_other_nodes_compute(second: tuple[float, float | None], step: float) -> None:
    made = plan_nodes(llama(2), nodes_of("10MB", "10MB"), **SHAPE)
    predictions = [Prediction(None, token, "the link", {}, after) for token, after in ((1.0, 0.4), second)]
    stages = [
        replace(stage, plan=replace(stage.plan, prediction=found)) for stage, found in zip(made.stages, predictions)
    ]
    assert replace(made, stages=tuple(stages), crossings=()).step == pytest.approx(step)


@pytest.mark.slow
def test_a_node_with_little_memory_has_fewer_layers() -> None:
    layer = sum(each.nbytes for each in llama().model.layers[0].parameters())
    head = llama().lm_head.weight.nbytes
    small = 2 * layer + head + 200_000
    made = plan_nodes(llama(), nodes_of("10MB", str(small)), **SHAPE)
    assert made.stages[1].plan.devices["cpu"].total <= small
    with pytest.raises(BudgetError, match="node 'n1' with layers"):
        plan_nodes(llama(2), nodes_of("10MB", str(head // 2)), **SHAPE)


@pytest.mark.slow
def test_throughput_gives_the_slow_node_fewer_layers() -> None:
    slow, fast = Node("slow", {"cpu": "10MB"}, machine(host=4e-9)), Node("fast", {"cpu": "10MB"}, machine(host=1e-9))
    made = plan_nodes(llama(), Nodes((slow, fast), LinkSpeed(1e9)), objective="throughput", **SHAPE)
    assert made.stages[0].stop == 1


@pytest.mark.slow
def test_the_json_reads_back() -> None:
    made = plan_nodes(llama(2), nodes_of("10MB", "10MB"), **SHAPE)
    assert NodesPlan.from_json(made.to_json()) == made
    with pytest.raises(PlanError, match="format 99"):
        NodesPlan.from_json('{"format": 99}')
    with pytest.raises(PlanError, match="not a plan over nodes"):
        NodesPlan.from_json("[]")
    content = json.loads(made.to_json())
    for key, wrong in (("stages", []), ("crossings", [{**content["crossings"][0], "rate": 0}])):
        with pytest.raises(PlanError):
            NodesPlan.from_json(json.dumps({**content, key: wrong}))
    assert "n1" in str(made)


@pytest.mark.slow
def test_a_node_of_unknown_speed_is_refused() -> None:
    nodes = Nodes((Node("far", {63: "24GB", "cpu": "64GB"}),), LINK)
    with pytest.raises(PlanError, match="node 'far' has devices that this machine lacks"):
        plan_nodes(llama(2), nodes, **SHAPE)


@pytest.mark.slow
@pytest.mark.virtual_only("budgets without what libraries of a real accelerator keep")
def test_what_crosses_is_copied_from_and_to_accelerators() -> None:
    fast = nominal_machine()
    accelerated, plain = Node("a", {0: "10MB", "cpu": "10MB"}, fast), Node("b", {"cpu": "10MB"}, fast)
    there, back = plan_nodes(llama(2), Nodes((accelerated, plain), LINK), **SHAPE).crossings
    links = fast.link("cuda:0")
    assert (there.leaves, there.enters) == (links.to_host_pageable, None)
    assert (back.leaves, back.enters) == (None, links.to_device_pageable)
    copied = links.to_host_pageable.seconds(there.step_bytes)
    assert there.step == pytest.approx(LINK.seconds(there.step_bytes) + copied)
    assert back.prefill == pytest.approx(
        LINK.seconds(back.step_bytes) + links.to_device_pageable.seconds(back.step_bytes)
    )
