"""DeepSpeed configuration by dotted names, and placeholders for its optimizer and scheduler."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train.strategies.deepspeed.config import DeepSpeedConfig, DummyOptim, DummyScheduler, EngineScheduler

CONTENT = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "train_batch_size": "auto"}


def test_it_is_a_dict_a_file_or_another_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONTENT))
    for source in (CONTENT, path, DeepSpeedConfig(CONTENT)):
        config = DeepSpeedConfig(source)
        assert config.config == CONTENT
        assert config.config is not CONTENT
        assert (config.stage, config.is_zero3(), config.is_zero2(), config.is_offload()) == (3, True, False, True)


@pytest.mark.parametrize("url_safe", [True, False])
def test_it_may_be_json_itself_or_base64(url_safe: bool) -> None:
    content = {**CONTENT, "long": "\u00ff?" * 300}  # longer than a file's name may be
    text = json.dumps(content, ensure_ascii=False)
    encoded = base64.urlsafe_b64encode(text.encode()).decode() if url_safe else text
    assert DeepSpeedConfig(encoded).config == content


def test_a_text_that_is_neither_is_taken_for_a_path() -> None:
    for text in ("no-such-file", "bm8=", "[1]"):
        with pytest.raises(TrainError, match="does not exist"):
            DeepSpeedConfig(text)


def test_values_are_found_and_set_by_dotted_names() -> None:
    config = DeepSpeedConfig(CONTENT)
    assert config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert config.get_value("zero_optimization.stage.deeper", "default") == "default"
    config.set_value("fp16.enabled", True)
    assert config.is_true("fp16.enabled")
    assert not config.is_true("bf16.enabled")


def test_a_changed_stage_counts_at_once() -> None:
    config = DeepSpeedConfig(CONTENT)
    config.set_value("zero_optimization", {"stage": 2})
    config.set_stage_and_offload()
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (True, False, False)


def test_auto_waits_to_be_filled_in_and_nothing_else_is() -> None:
    config = DeepSpeedConfig(CONTENT)
    assert config.autos() == ["train_batch_size"]
    config.fill("train_batch_size", 8)
    config.fill("zero_optimization.stage", 1)
    assert (config.get_value("train_batch_size"), config.stage, config.autos()) == (8, 3, [])
    assert DeepSpeedConfig({"zero_optimization": {"stage": "auto"}}).is_zero2()


@pytest.mark.parametrize(
    ("content", "says"), [(None, "does not exist"), ("{", "is not JSON"), ("[1]", "must be a JSON object, not a list")]
)
def test_files_that_are_none_are_refused(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TrainError, match=says):
        DeepSpeedConfig(path)


def test_they_keep_what_the_configuration_is_filled_with() -> None:
    parameters = list(nn.Linear(1, 1).parameters())
    optimizer = DummyOptim(iter(parameters), lr=0.1, weight_decay=0.2, betas=(0.9, 0.95))
    assert optimizer.params == parameters
    assert (optimizer.lr, optimizer.weight_decay, optimizer.kwargs) == (0.1, 0.2, {"betas": (0.9, 0.95)})
    scheduler = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2, lr_scheduler_callable=print, x=1)
    assert scheduler.optimizer is optimizer
    assert (scheduler.total_num_steps, scheduler.warmup_num_steps) == (10, 2)
    assert (scheduler.lr_scheduler_callable, scheduler.kwargs) == (print, {"x": 1})


def test_an_engine_s_scheduler_is_not_stepped_twice() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler = EngineScheduler(inner, optimizer)
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
    state = scheduler.state_dict()
    optimizer.step()
    inner.step()
    scheduler.load_state_dict(state)
    assert inner.last_epoch == 0


def test_transformers_looks_values_up_and_deletes_them() -> None:
    config = DeepSpeedConfig({"fp16": {"enabled": False}, "optimizer": {"type": "Adam"}})
    assert config.find_config_node("fp16.enabled") == ({"enabled": False}, "enabled")
    assert config.find_config_node("scheduler.params.lr") == (None, "lr")
    assert config.is_false("fp16.enabled")
    assert not config.is_false("bf16.enabled")
    config.del_config_sub_tree("optimizer")
    config.del_config_sub_tree("optimizer")
    assert config.config == {"fp16": {"enabled": False}}
    with pytest.raises(TrainError, match="has no optimizer"):
        config.del_config_sub_tree("optimizer", must_exist=True)
