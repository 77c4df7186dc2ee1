"""`prepare_pippy` in one process, of a model that is dispatched to several accelerators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel import prepare_pippy
from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.errors import TrainError
from bigmodel.plan import plan

from .test_inference import Network, in_one_process, tokens

pytestmark = [pytest.mark.virtual_only("several accelerators"), pytest.mark.usefixtures("accelerators")]

PLACES = {"embed": "virtual:0", "layers.0": "virtual:0", "layers.1": "virtual:1", "layers.2": "virtual:1"}


def in_stages() -> Any:
    return dispatch_model(Network(8, 8, 8), PLACES)


def batch(rows: int) -> torch.Tensor:
    return tokens(rows).to("virtual:0")


def steps(model: Any) -> int:
    found = dispatched(model)
    assert found is not None
    assert found.stages is not None
    return found.stages.times.steps


@pytest.mark.parametrize(("given", "parts"), [({}, [3, 3]), ({"num_chunks": 3}, [2, 2, 2])], ids=["default", "chunks"])
def test_a_batch_has_as_many_micro_batches_as_stages_or_as_asked(given: dict[str, Any], parts: list[int]) -> None:
    model = prepare_pippy(in_stages(), **given)
    assert model.hf_split_points == ["layers.1"]
    found = model(batch(6))  # for inference, also where gradients are on
    assert not found["hidden"].requires_grad
    expected = in_one_process(Network(8, 8, 8).to("virtual:0"), batch(6), parts[0])
    for name in ("hidden", "sums"):
        assert torch.equal(found[name].cpu(), expected[name].cpu())  # type: ignore[union-attr]
    assert found["none"] is None
    assert steps(model) == len(parts)


def test_a_micro_batch_has_the_rows_of_an_example() -> None:
    model = prepare_pippy(in_stages(), example_args=(batch(2),))
    for rows in (2, 5):
        found = model(batch(rows))
        expected = in_one_process(Network(8, 8, 8).to("virtual:0"), batch(rows), 2)
        assert torch.equal(found["sums"].cpu(), expected["sums"].cpu())  # type: ignore[union-attr]
    assert steps(model) == 3


@pytest.mark.slow
def test_micro_batches_are_those_of_the_plan_unless_others_are_asked_for() -> None:
    from tests.server.tiny import tiny_model

    shape: dict[str, Any] = {"batch_size": 6, "context_length": 8, "micro_batch_size": 1}
    for given, count in ({}, 6), ({"num_chunks": 2}, 2):
        model = tiny_model(layers=2)
        made = plan(model, {0: 2**28, 1: 2**28, "cpu": 2**40}, "balanced", **shape)
        model = prepare_pippy(dispatch_model(model, made), **given)
        model(torch.zeros(6, 4, dtype=torch.long, device="virtual:0"))
        assert steps(model) == count


def test_stages_begin_where_the_model_is_dispatched_to() -> None:
    assert prepare_pippy(in_stages(), ["layers.1"]).hf_split_points == ["layers.1"]
    with pytest.raises(TrainError, match=r"dispatched to stages that begin with \['layers\.1'\]"):
        prepare_pippy(in_stages(), ["layers.2"])


def test_a_model_on_one_accelerator_stays_as_it_is() -> None:
    model = dispatch_model(Network(8, 8), {"": "virtual:0"})
    assert prepare_pippy(model, num_chunks=2).hf_split_points == []
    expected = Network(8, 8).to("virtual:0")(batch(4))["sums"]
    assert torch.equal(model(batch(4))["sums"].cpu(), expected.cpu())


@pytest.mark.slow
def test_micro_batches_need_the_room_of_the_plan() -> None:
    from tests.server.tiny import tiny_model

    shape: dict[str, Any] = {"batch_size": 4, "context_length": 64}

    def in_budget(nbytes: int) -> Any:
        model = tiny_model(layers=2)
        return dispatch_model(model, plan(model, {0: nbytes, 1: nbytes, "cpu": 2**40}, "balanced", **shape))

    assert prepare_pippy(in_budget(2**28), num_chunks=2) is not None
    roomy = plan(tiny_model(layers=2), {0: 2**28, 1: 2**28, "cpu": 2**40}, "balanced", **shape)
    need = max(device.total for device in roomy.devices.values())
    with pytest.raises(TrainError, match=r"micro-batches of 4 rows, 3 at once, may take .* micro_batch_size=4"):
        prepare_pippy(in_budget(need + 2**18), example_args=(torch.zeros(4, 8, dtype=torch.long),))
