"""A unit that reads a weight of another within its own forward: the copy of an offloaded weight is planned."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from bigmodel import dispatch_model, make_plan
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.profile import profile_model
from bigmodel.profile.trace.events import OutsideUse

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = "virtual:0"


class Lending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x))
        return found


class Borrowing(nn.Module):
    def __init__(self, lender: Lending) -> None:
        super().__init__()
        self.own = nn.Linear(64, 64)
        self.lender = [lender]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.own(x) + linear(x, self.lender[0].first.weight)
        return found


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.table(ids))
        return found


def test_the_copy_of_a_weight_of_another_unit_is_planned_to_the_byte() -> None:
    blocks = [Lending() for _ in range(3)]
    model = nn.Sequential(*blocks, Borrowing(blocks[0]))
    inputs = {"input": torch.ones(2, 64)}
    classes = ["Lending", "Borrowing"]
    profile = profile_model(model, sample_inputs=inputs, no_split_module_classes=classes, device_type="virtual")
    plan = make_plan(profile, {0: profile.weights * 3 // 4 + 20_000, "cpu": 2**30})
    assert plan.streamed
    x = torch.ones(2, 64, device=DEVICE)
    before = memory_allocated(DEVICE) - x.nbytes
    dispatch_model(model, plan)
    reset_peak_memory(DEVICE)
    with torch.no_grad():
        model(x)
    assert max_memory_allocated(DEVICE) - before <= plan.devices[0].total
    assert max_memory_allocated(DEVICE) - before >= 0.9 * plan.devices[0].total


def test_a_tied_weight_is_a_unit_s_own() -> None:
    profile = profile_model(Tied(), sample_inputs=(torch.zeros(1, 2, dtype=torch.long),))
    assert not any(isinstance(event, OutsideUse) for event in profile.phases[0].trace.events)


def test_a_model_that_makes_its_mask_under_a_transform_is_known() -> None:
    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(x.shape[0])
            mask = torch.vmap(lambda one: one.add(places).gt(places) & places.ge(one))(places)
            found: torch.Tensor = mask.to(x.dtype) @ self.layer(x)
            return found

    profile = profile_model(nn.Sequential(Masking(), nn.Linear(4, 4)), sample_inputs=(torch.zeros(3, 4),))
    assert profile.phases
    assert profile.unknown == ""
