"""Settings of DeepSpeed: from arguments, a configuration file, and the launcher's variables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigmodel.errors import TrainError
from bigmodel.train.strategies.deepspeed.config import DeepSpeedConfig
from bigmodel.train.strategies.deepspeed.plugin import DeepSpeedPlugin


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("ACCELERATE_DEEPSPEED", "ACCELERATE_GRADIENT")):
            monkeypatch.delenv(name)


def test_the_default_is_stage_2() -> None:
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.deepspeed_config["zero_optimization"]["stage"]) == (2, 2)
    assert plugin.zero3_init_flag is False


def test_arguments_become_a_configuration() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu", gradient_clipping=1.5, zero3_init_flag=False)
    assert plugin.get_value("zero_optimization.offload_param.device") == "cpu"
    assert plugin.get_value("gradient_clipping") == 1.5
    assert plugin.get_value("zero_optimization.offload_optimizer.device") is None


def test_the_launchers_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.offload_optimizer_device, plugin.gradient_accumulation_steps) == (3, "cpu", 4)


def test_a_file_wins_except_where_it_says_auto(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    content = {"zero_optimization": {"stage": 1}, "gradient_clipping": "auto", "train_batch_size": 8}
    path.write_text(json.dumps(content))
    plugin = DeepSpeedPlugin(hf_ds_config=str(path), zero_stage=2, gradient_clipping=0.7)
    assert (plugin.zero_stage, plugin.gradient_clipping) == (1, 0.7)
    assert plugin.deepspeed_config["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("precision", "section"), [("bf16", {"enabled": True}), ("fp16", {"enabled": True, "auto_cast": True})]
)
def test_the_precision_is_written_into_the_configuration(precision: str, section: dict) -> None:
    plugin = DeepSpeedPlugin(zero_stage=1)
    plugin.set_mixed_precision(precision)
    assert plugin.deepspeed_config[precision] == section


def test_a_precision_that_contradicts_the_file_is_refused() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}})
    with pytest.raises(TrainError, match="mixed_precision is 'bf16', but the DeepSpeed configuration enables fp16"):
        plugin.set_mixed_precision("bf16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"zero_stage": 4}, "zero_stage is 4; it must be 0, 1, 2 or 3"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "offload_param_device needs zero_stage 3, not 2"),
        ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "needs zero_stage 1, 2 or 3"),
        ({"zero_stage": 3, "offload_param_device": "nvme", "zero3_init_flag": False}, "give a folder in offload_param"),
        ({"offload_optimizer_device": "tape"}, "offload_optimizer_device is 'tape'"),
        ({"hf_ds_config": "missing.json"}, "missing.json does not exist"),
        ({"hf_ds_config": {"fp16": {}}}, "has no zero_optimization section"),
        ({"enable_msamp": True}, "MS-AMP is not supported"),
    ],
)
def test_what_cannot_be_is_said(arguments: dict, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        DeepSpeedPlugin(**arguments)


def test_transformers_is_told_to_shard_while_loading() -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed", reason="transformers is not installed")
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    try:
        assert integration.is_deepspeed_zero3_enabled()
        with plugin.zero3_init_context_manager(enable=False):
            assert not integration.is_deepspeed_zero3_enabled()
        assert integration.is_deepspeed_zero3_enabled()
    finally:
        integration.unset_hf_deepspeed_config()


def test_a_configuration_of_the_caller_s_class_stays_the_same_object() -> None:
    given = DeepSpeedConfig({"zero_optimization": {"stage": 1}})
    assert DeepSpeedPlugin(hf_ds_config=given).hf_ds_config is given
