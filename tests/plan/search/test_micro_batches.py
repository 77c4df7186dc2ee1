"""The rows of micro-batches: those of least predicted seconds."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.errors import PlanError
from bigmodel.plan import Plan, plan
from bigmodel.plan.result.stages import ResidentStages
from bigmodel.plan.search.micro_batches import batch_seconds

from ...profile.models import tiny_llama
from ..machines import computing, llama_profile, machine

pytestmark = pytest.mark.usefixtures("accelerators")

EVEN = ResidentStages((0, 1), ((1, (1.0, 1.0)), (64, (64.0, 64.0))), 0.0)
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}


def test_of_m_micro_batches_over_n_stages_all_but_the_ends_overlap() -> None:
    assert batch_seconds(EVEN, 12, 12) == pytest.approx(24.0)
    assert batch_seconds(EVEN, 12, 1) == pytest.approx(13.0)
    assert batch_seconds(EVEN, 12, 5) == pytest.approx(5 + 5 + 2 + 5)  # the last one waits for the one before
    slow = ResidentStages((0, 1), EVEN.seconds, 3.0)
    assert batch_seconds(slow, 4, 1) == pytest.approx(4 * 3.0 + 2.0)


def planned(size: int | str | None, accelerators: int = 2, batch: int = 8, **more: Any) -> Plan:
    of = llama_profile(batch_size=batch, **SHAPE)
    budget: dict[Any, Any] = dict.fromkeys(range(accelerators), 2 * of.weights + 4 * of.activations + 2**26)
    shape: dict[str, Any] = {"batch_size": batch, "context_length": 32}
    return plan(tiny_llama(**SHAPE), {**budget, "cpu": "1GB"}, "balanced", micro_batch_size=size, **shape, **more)


@pytest.mark.slow
def test_devices_that_compute_get_small_ones() -> None:
    made = planned("auto", machine=computing())
    assert made.micro_batch_size in (1, 2)
    assert "micro-batches of so many" in made.explain()
    assert Plan.from_json(made.to_json()).micro_batch_size == made.micro_batch_size


@pytest.mark.slow
def test_slow_launches_get_none() -> None:
    made = planned("auto", machine=machine(1e13, accelerator=1e-10, call=1e-3))
    assert made.micro_batch_size is None
    assert "micro-batches" not in made.explain()


@pytest.mark.slow
def test_a_number_is_obeyed_where_there_are_stages() -> None:
    assert planned(3).micro_batch_size == 3
    one = planned(3, accelerators=1)
    assert one.micro_batch_size is None
    assert "not all parts are resident on several accelerators" in one.explain()
    assert planned(None).micro_batch_size is None


@pytest.mark.slow
def test_what_fixes_the_rows_is_refused() -> None:
    with pytest.raises(PlanError, match="micro_batch_size needs the model itself"):
        plan(llama_profile(), {0: "1GB", "cpu": "1GB"}, micro_batch_size=2)
    with pytest.raises(PlanError, match="micro_batch_size is 0"):
        plan(tiny_llama(), {0: "1GB", "cpu": "1GB"}, micro_batch_size=0)
    with pytest.raises(PlanError, match="micro_batch_size is 'some'"):
        plan(tiny_llama(), {0: "1GB", "cpu": "1GB"}, micro_batch_size="some")
