"""AcceleratorState: precision and kind of run, from plugins and the launcher's variables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator, AcceleratorState, DeepSpeedPlugin, DistributedType, PartialState
from bigmodel.train.accelerator_state import Plugins, choose_kind


def test_it_has_what_partial_state_has_and_more() -> None:
    state = AcceleratorState(mixed_precision="bf16")
    assert state.mixed_precision == "bf16"
    assert state.device == torch.device("cpu")
    assert state.is_main_process
    assert state.distributed_type == DistributedType.NO
    assert state.deepspeed_plugin is None
    assert not state.is_fsdp2
    assert "bf16" in repr(state)


def test_which_process_it_is_and_their_group_are_known_after_a_reset() -> None:
    accelerator = Accelerator()
    state = accelerator.state
    AcceleratorState._reset_state()
    state.wait_for_everyone()
    state.destroy_process_group()
    assert (accelerator.is_main_process, accelerator.is_local_main_process) == (True, True)
    assert (state.is_main_process, state.is_local_main_process, state.is_last_process) == (True, True, True)


def test_what_a_reset_has_taken_away_says_so() -> None:
    accelerator = Accelerator()
    AcceleratorState._reset_state()
    for read in (lambda: accelerator.device, lambda: accelerator.num_processes):
        with pytest.raises(AttributeError, match=r"`AcceleratorState` object has no attribute .*_reset_state\(\)"):
            read()


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
    with pytest.raises(AttributeError, match=r"has no attribute `device`.* make an `Accelerator` first"):
        _ = state.device


def test_the_deepspeed_plugin_chosen_by_name_is_the_one_transformers_loads_by() -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed", reason="transformers is not installed")
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)}
    state = AcceleratorState(plugins=Plugins(deepspeed=plugins))
    try:
        assert state.plugin is plugins["student"]
        assert not integration.is_deepspeed_zero3_enabled()
        state.select_deepspeed_plugin("teacher")
        assert state.plugin is plugins["teacher"]
        assert integration.is_deepspeed_zero3_enabled()
        with pytest.raises(TrainError, match=r"no DeepSpeed plugin named 'x'; there are \['student', 'teacher'\]"):
            state.select_deepspeed_plugin("x")
    finally:
        integration.unset_hf_deepspeed_config()
        state.destroy_process_group()


def kind(**plugins: object) -> DistributedType:
    return choose_kind(DistributedType.MULTI_CPU, Plugins(**plugins)).distributed_type


def test_processes_alone_train_data_parallel() -> None:
    assert kind() == DistributedType.MULTI_CPU


def test_a_plugin_names_its_strategy() -> None:
    assert kind(deepspeed=object()) == DistributedType.DEEPSPEED
    assert kind(fsdp=object()) == DistributedType.FSDP
    assert kind(tensor_parallel=object()) == DistributedType.TP


def test_a_mesh_names_its_strategy() -> None:
    assert kind(parallelism_config=SimpleNamespace(tp_size=2, dp_shard_size=1)) == DistributedType.TP
    assert kind(parallelism_config=SimpleNamespace(tp_size=2, dp_shard_size=2)) == DistributedType.FSDP
    assert kind(parallelism_config=SimpleNamespace(tp_size=1, dp_shard_size=1)) == DistributedType.MULTI_CPU


def test_the_launcher_names_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert kind() == DistributedType.FSDP


def test_two_strategies_are_refused() -> None:
    with pytest.raises(TrainError, match="both deepspeed_plugin and fsdp_plugin"):
        kind(deepspeed=object(), fsdp=object())


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("ACCELERATE_USE_MEGATRON_LM", "1", "Megatron-LM is not supported; use FSDP2"),
        ("ACCELERATE_USE_SAGEMAKER", "true", "SageMaker is not supported; start the script with torchrun"),
        ("PJRT_DEVICE", "TPU", "TPUs are not supported; train on CUDA GPUs"),
    ],
)
def test_what_is_not_supported_names_the_alternative(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(TrainError, match=says):
        kind()


def test_a_megatron_plugin_is_refused() -> None:
    with pytest.raises(TrainError, match="Megatron-LM is not supported"):
        kind(megatron_lm=object())
