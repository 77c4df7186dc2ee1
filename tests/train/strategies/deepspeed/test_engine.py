"""What DeepSpeed is asked for, filled in from the run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from bigmodel.errors import TrainError
from bigmodel.train.strategies.base import StrategySettings
from bigmodel.train.strategies.deepspeed import engine as deepspeed_engine
from bigmodel.train.strategies.deepspeed.config import DummyOptim, DummyScheduler
from bigmodel.train.strategies.deepspeed.engine import import_deepspeed, make_engine
from bigmodel.train.strategies.deepspeed.plugin import DeepSpeedPlugin

CPU = torch.device("cpu")
SECTION = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto"}}}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What DeepSpeed is called with."""
    found: dict[str, Any] = {}
    fake = SimpleNamespace(
        initialize=lambda **arguments: found.update(arguments, rank=os.environ.get("LOCAL_RANK")) or ("engine",)
    )
    monkeypatch.setattr(deepspeed_engine, "import_deepspeed", lambda device: fake)
    return found


def make(config: dict[str, Any], optimizer: Any, scheduler: Any = None, loaders: tuple[Any, ...] = ()) -> Any:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, **config})
    settings = StrategySettings(CPU, num_processes=4, gradient_accumulation_steps=3)
    return make_engine(settings, plugin, nn.Linear(2, 2), optimizer, scheduler, loaders)


def test_sizes_follow_from_the_loaders_and_the_run(asked: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    loaders = (DataLoader([1], batch_size=8), DataLoader([1], batch_size=2))
    assert make(SECTION, optimizer, loaders=loaders) == "engine"
    config = asked["config_params"]
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 3)
    assert (config["train_batch_size"], config["gradient_clipping"]) == (24, 0.0)
    assert asked["optimizer"] is optimizer
    assert "optimizer" not in config  # the user's own is used


def test_a_process_without_a_launcher_tells_it_its_rank(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    make(SECTION, torch.optim.SGD(nn.Linear(1, 1).parameters()))
    assert (asked["rank"], "LOCAL_RANK" in os.environ) == ("0", False)


def test_stand_ins_fill_the_sections_they_stand_for(asked: dict[str, Any]) -> None:
    optimizer = DummyOptim([nn.Parameter(torch.ones(1))], lr=0.3, weight_decay=0.2, betas=(0.9, 0.95))
    make({**SECTION, **SCHEDULE}, optimizer, DummyScheduler(optimizer, warmup_num_steps=5))
    config = asked["config_params"]
    assert config["optimizer"]["params"] == {"lr": 0.3, "weight_decay": 0.2, "betas": (0.9, 0.95)}
    assert config["scheduler"]["params"] == {"warmup_max_lr": 0.3, "warmup_num_steps": 5}
    assert asked["model_parameters"] == optimizer.params


@pytest.mark.parametrize(
    ("config", "dummies", "says"),
    [
        ({}, (True, False), "DummyOptim stands for the optimizer"),
        (SECTION, (True, True), "DummyScheduler stands for the scheduler"),
        ({"gradient_accumulation_steps": 5}, (False, False), "accumulates 5 steps, the Accelerator 3"),
        ({"communication_data_type": "auto"}, (False, False), "leaves communication_data_type at 'auto'"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    asked: dict[str, Any], config: dict[str, Any], dummies: tuple[bool, bool], says: str
) -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    optimizer: Any = DummyOptim(parameters, betas=(0.9, 0.95)) if dummies[0] else torch.optim.SGD(parameters)
    with pytest.raises(TrainError, match=says):
        make(config, optimizer, DummyScheduler(optimizer) if dummies[1] else None)


@pytest.mark.slow
def test_nothing_is_compiled_and_a_lock_left_by_a_killed_run_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install bigmodel[deepspeed]")
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    import_deepspeed(CPU)
    from deepspeed.comm.torch import build_shm_op

    assert build_shm_op() is None
    assert [path.name for path in lock.parent.iterdir()] == ["lock"]
