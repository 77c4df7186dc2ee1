"""A resident dispatched model: nothing left on its modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.benchmarks.resident import hooked_modules, sharing_twin

from .answering import answer, limit, rows


@pytest.mark.slow
def test_nothing_is_left_on_a_resident_model(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["resident", "--steps", "1"], workdir, capsys)
    assert {row["variant"] for row in rows(found)} == {
        "plain",
        "bigmodel, resident",
        "accelerate, resident, hooks forced",
    }
    assert limit(found, "left on them")["measured"] == 0


def test_hooks_and_replaced_forwards_are_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert hooked_modules(model) == 0
    model[0].register_forward_hook(lambda *_: None)
    model[1].forward = lambda x: x  # type: ignore[method-assign, assignment]
    assert hooked_modules(model) == 2


def test_a_twin_is_another_model_of_the_same_tensors() -> None:
    model = nn.Linear(2, 2)
    twin = sharing_twin(model)
    assert twin is not model
    assert twin.get_parameter("weight") is model.weight
    assert torch.equal(twin(torch.ones(2)), model(torch.ones(2)))
