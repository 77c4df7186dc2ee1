"""Settings of DeepSpeed: from arguments, a configuration file, and the launcher's variables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator
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


AUTOS = {
    "train_batch_size": "auto",
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}},
    "zero_optimization": {"stage": 2},
}


def test_auto_is_filled_in_and_other_values_are_compared() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=AUTOS)
    mismatches: list[str] = []
    plugin.fill_match("train_batch_size", mismatches, train_batch_size=16)
    plugin.fill_match("zero_optimization.stage", mismatches, **{"zero_optimization.stage": 3})
    plugin.fill_match("gradient_clipping", mismatches, must_match=False, gradient_clipping=2.0)
    plugin.fill_match("no.such.section", mismatches, **{"no.such.section": 1})
    assert plugin.get_value("train_batch_size") == 16
    assert mismatches == ["- ds zero_optimization.stage=2 vs arg zero_optimization.stage=3"]
    with pytest.raises(ValueError, match=r"optimizer\.params\.lr is 'auto' .* no value of it is given"):
        plugin.fill_match("optimizer.params.lr")


def test_the_whole_configuration_is_filled_in() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=AUTOS)
    values = {"train_batch_size": 16, "optimizer.params.lr": 0.5, "optimizer.params.eps": 1e-8}
    plugin.deepspeed_config_process(**values)
    assert plugin.deepspeed_config["optimizer"]["params"] == {"lr": 0.5, "eps": 1e-8}
    assert not plugin.is_auto("train_batch_size")
    with pytest.raises(ValueError, match=r"differs(.|\n)*- ds optimizer\.params\.eps=1e-08 vs arg"):
        plugin.deepspeed_config_process(**{**values, "optimizer.params.eps": 1e-6})
    plugin.deepspeed_config_process(must_match=False, **{**values, "optimizer.params.eps": 1e-6})


def test_one_of_several_plugins_is_selected_by_the_state() -> None:
    plugins = {name: DeepSpeedPlugin(zero_stage=stage) for name, stage in (("teacher", 1), ("student", 2))}
    assert not any(plugin.selected for plugin in plugins.values())
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        plugins["student"].select()
    state = Accelerator(cpu=True, deepspeed_plugins=plugins).state
    assert [plugin.selected for plugin in plugins.values()] == [True, False]
    state.select_deepspeed_plugin("student")
    assert [plugin.selected for plugin in plugins.values()] == [False, True]


def test_the_only_plugin_is_selected() -> None:
    plugin = DeepSpeedPlugin(zero_stage=1)
    assert not Accelerator(cpu=True, deepspeed_plugin=plugin).state.fork_launched
    assert plugin.selected


def test_blocks_of_experts_are_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts(nn.Module):
        pass

    kept: list[object] = []
    for name in ("deepspeed", "deepspeed.utils"):
        fake = SimpleNamespace(set_z3_leaf_modules=lambda *given: kept.extend(given))
        monkeypatch.setitem(sys.modules, name, fake)
    model = nn.Sequential(nn.Linear(1, 1), Experts())
    DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Experts").set_moe_leaf_modules(model)
    assert kept == [model, [Experts]]
    DeepSpeedPlugin(zero_stage=2, transformer_moe_cls_names="Other").set_moe_leaf_modules(model)
    with pytest.raises(TrainError, match="Sequential has no module of class Other"):
        DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Other").set_moe_leaf_modules(model)
