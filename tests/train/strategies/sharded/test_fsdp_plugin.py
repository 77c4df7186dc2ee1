"""Settings of FSDP: from arguments, from the launcher's variables, with FSDP1's names."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy

from bigmodel.errors import TrainError
from bigmodel.train.strategies.sharded.fsdp_plugin import FullyShardedDataParallelPlugin as Plugin


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VERSION", "RESHARD_AFTER_FORWARD", "SHARDING_STRATEGY", "OFFLOAD_PARAMS", "AUTO_WRAP_POLICY"):
        monkeypatch.delenv("FSDP_" + name, raising=False)


def test_the_defaults_save_memory() -> None:
    plugin = Plugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.offload_to_cpu) == (2, True, False)
    assert (plugin.state_dict_type, plugin.auto_wrap_policy) == ("SHARDED_STATE_DICT", None)


def test_the_launchers_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "RESHARD_AFTER_FORWARD": "false",
        "OFFLOAD_PARAMS": "true",
        "AUTO_WRAP_POLICY": "transformer_based_wrap",
        "TRANSFORMER_CLS_TO_WRAP": "Block, Layer",
        "STATE_DICT_TYPE": "FULL_STATE_DICT",
        "ACTIVATION_CHECKPOINTING": "true",
    }
    for name, value in said.items():
        monkeypatch.setenv("FSDP_" + name, value)
    plugin = Plugin()
    assert (plugin.reshard_after_forward, plugin.offload_to_cpu) == (False, True)
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Layer"]
    assert (plugin.state_dict_type, plugin.activation_checkpointing) == ("FULL_STATE_DICT", True)
    assert Plugin(reshard_after_forward=True, cpu_offload=False).reshard_after_forward is True


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("FULL_SHARD", True),
        ("SHARD_GRAD_OP", False),
        ("HYBRID_SHARD", True),
        (1, 1),
        ("true", True),
        (8, 8),
        ("2", False),
    ],
)
def test_fsdp1s_strategies_mean_when_parameters_are_freed(given: object, expected: object) -> None:
    assert Plugin(reshard_after_forward=given).reshard_after_forward == expected


def test_hybrid_sharding_is_remembered() -> None:
    assert Plugin(sharding_strategy="HYBRID_SHARD").hybrid
    assert not Plugin(sharding_strategy="FULL_SHARD").hybrid


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharding_strategy": "NO_SHARD"}, "is plain data parallelism; leave FSDP out"),
        ({"reshard_after_forward": "sometimes"}, "it must be true, false, a number or an FSDP1 strategy"),
        ({"fsdp_version": 3}, "it must be 1 or 2"),
        ({"auto_wrap_policy": "by_taste"}, "auto_wrap_policy is 'by_taste'"),
        ({"state_dict_type": "MY_DICT"}, "state_dict_type is 'MY_DICT'"),
        ({"mixed_precision_policy": "fp12"}, "mixed_precision_policy is 'fp12'"),
    ],
)
def test_what_is_not_understood_is_said(arguments: dict, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        Plugin(**arguments)


def test_gradients_are_reduced_in_float32() -> None:
    plugin = Plugin()
    plugin.set_mixed_precision("bf16")
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy is policy


def test_policies_come_in_any_form() -> None:
    given = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "buffer_dtype": torch.float32}
    assert Plugin(mixed_precision_policy=given).mixed_precision_policy == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    )


@pytest.mark.parametrize(
    ("given", "offloads"),
    [
        (True, True),
        (False, False),
        (None, False),
        (CPUOffloadPolicy(), True),
        (OffloadPolicy(), False),
        (CPUOffload(offload_params=True), True),
        (CPUOffload(), False),
    ],
)
def test_every_form_of_offloading_becomes_a_policy(given: object, offloads: bool) -> None:
    plugin = Plugin(cpu_offload=given)
    assert plugin.offload_to_cpu is offloads
    plugin.set_cpu_offload()
    assert type(plugin.cpu_offload) is (CPUOffloadPolicy if offloads else OffloadPolicy)
    plugin.validate_cpu_offload()
    assert plugin.offload_to_cpu is offloads


def test_what_is_no_policy_is_refused() -> None:
    plugin = Plugin(cpu_offload=True)
    with pytest.raises(TrainError, match=r"cpu_offload is True, no .*OffloadPolicy"):
        plugin.validate_cpu_offload()
    with pytest.raises(TrainError, match=r"mixed_precision_policy is None, no .*MixedPrecisionPolicy"):
        plugin.validate_mixed_precision_policy()
    plugin.set_mixed_precision("bf16")
    plugin.validate_mixed_precision_policy()
    with pytest.raises(TrainError, match="buffer_autocast is True"):
        plugin.set_mixed_precision("bf16", buffer_autocast=True)


@pytest.mark.parametrize(
    ("given", "reshard", "hybrid"),
    [
        (1, True, False),
        (2, False, False),
        (4, True, True),
        ("5", False, True),
        (ShardingStrategy.SHARD_GRAD_OP, False, False),
        (ShardingStrategy._HYBRID_SHARD_ZERO2, False, True),
    ],
)
def test_strategies_of_fsdp1_may_be_given_by_their_numbers(given: object, reshard: bool, hybrid: bool) -> None:
    plugin = Plugin(sharding_strategy=given)
    assert (plugin.reshard_after_forward, plugin.hybrid) == (reshard, hybrid)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_number_to_reshard_to_counts_ranks(ranks: int) -> None:
    plugin = Plugin(reshard_after_forward=ranks)
    assert (plugin.reshard_after_forward, plugin.hybrid) == (ranks, False)


def test_a_policy_is_settled_for_a_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    model._no_split_modules = ["ReLU"]  # type: ignore[assignment]

    def settled(**arguments: object) -> Plugin:
        plugin = Plugin(**arguments)
        plugin.set_auto_wrap_policy(model)
        return plugin

    assert settled(auto_wrap_policy="transformer_based_wrap").transformer_cls_names_to_wrap == ["ReLU"]
    named = settled(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"])
    assert named.transformer_cls_names_to_wrap == ["Linear"]
    assert settled(auto_wrap_policy="size_based_wrap").auto_wrap_policy is None
    assert settled(auto_wrap_policy="size_based_wrap", min_num_params=4).auto_wrap_policy == "SIZE_BASED_WRAP"
    with pytest.raises(TrainError, match="no module of class Conv1d"):
        settled(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Conv1d"])
