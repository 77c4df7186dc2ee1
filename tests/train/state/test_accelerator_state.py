"""AcceleratorState: precision and kind of run, set by the first Accelerator."""

from __future__ import annotations

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train import AcceleratorState, DistributedType, PartialState


def test_it_has_what_partial_state_has_and_more() -> None:
    state = AcceleratorState(mixed_precision="bf16")
    assert state.mixed_precision == "bf16"
    assert state.device == torch.device("cpu")
    assert state.is_main_process
    assert state.distributed_type == DistributedType.NO
    assert state.deepspeed_plugin is None
    assert not state.is_fsdp2
    assert "bf16" in repr(state)


def test_the_launcher_s_precision_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert AcceleratorState().mixed_precision == "bf16"


def test_a_later_instance_cannot_change_it() -> None:
    AcceleratorState(mixed_precision="bf16")
    assert AcceleratorState().mixed_precision == "bf16"
    with pytest.raises(TrainError, match="made with mixed_precision='bf16'"):
        AcceleratorState(mixed_precision="fp16")


def test_a_failed_start_leaves_nothing_behind() -> None:
    with pytest.raises(TrainError, match="'fp12'"):
        AcceleratorState(mixed_precision="fp12")
    assert AcceleratorState().mixed_precision == "no"


def test_resetting_both_states_looks_at_the_environment_again() -> None:
    AcceleratorState()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not PartialState._shared_state
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = AcceleratorState().nonsense


def test_a_state_that_was_forgotten_says_what_to_do() -> None:
    state = AcceleratorState()
    AcceleratorState._reset_state()
    with pytest.raises(AttributeError, match="no attribute 'device' yet: make an Accelerator first"):
        _ = state.device


def test_deepspeed_plugins_are_chosen_by_name() -> None:
    state = AcceleratorState()
    state._named_plugins = {"student": 1, "teacher": 2}
    state.select_deepspeed_plugin("teacher")
    assert state.plugin == 2
    with pytest.raises(TrainError, match=r"no DeepSpeed plugin named 'x'; there are \['student', 'teacher'\]"):
        state.select_deepspeed_plugin("x")
