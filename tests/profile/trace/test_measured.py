"""A forward that ran for real, as a phase to plan with."""

from __future__ import annotations

import torch
from torch import nn

from bigmodel.profile import profile_model
from bigmodel.profile.trace.measured import MeasuredForward


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def test_the_peak_is_the_activations_of_the_profile() -> None:
    profile = profile_model(model(), measured=MeasuredForward(1000, ("0", "1", "2")))
    assert profile.activations == 1000
    assert sum(profile.kv_cache) == 0
    assert "first forward" in profile.unknown


def test_the_peak_counts_on_each_device_that_runs_a_unit() -> None:
    profile = profile_model(model(), measured=MeasuredForward(1000, ("0", "1", "2")))
    assert profile.dynamic_peaks({0: 0, 1: 0, 2: 1}, main=0) == {0: 1000, 1: 1000}
    assert profile.dynamic_peaks({0: 1, 1: 1, 2: 1}, main=0) == {0: 1000, 1: 1000}


def test_units_are_in_the_order_in_which_they_ran() -> None:
    profile = profile_model(model(), measured=MeasuredForward(1000, ("2", "0", "1", "of another model")))
    assert [unit.name for unit in profile.units] == ["2", "0", "1"]
