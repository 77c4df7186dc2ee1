"""What kind of run follows from plugins and the launcher's variables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bigmodel.errors import TrainError
from bigmodel.train import DistributedType
from bigmodel.train.state.kind import Plugins, choose_kind


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
