"""The content of a checkpoint, and that killing any process at any moment leaves a whole one."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from bigmodel.train import Accelerator, DataLoaderConfiguration
from bigmodel.train.accelerator.run_state import read_run_state, write_run_state
from tests.examples import alike
from tests.train.accelerator.models import Run
from tests.train.killed import kill_during_save
from tests.train.multiprocess import fresh_states


def check_killed(folder: Path, automatic: bool, seeds: range) -> None:
    for seed in seeds:
        own = folder / str(seed)
        own.mkdir()
        done, loaded = kill_during_save(own, automatic, seed)
        assert len(loaded) == 1, f"seed {seed}: parts of different saves were loaded: {loaded}"
        assert done <= loaded.pop() <= done + 1, f"seed {seed}: save {done} was done, and is lost"


@pytest.mark.slow
@alike("automatic", [False, True], first=1, ids=["one folder", "numbered folders"])
def test_killing_a_process_while_it_saves_leaves_the_last_good_checkpoint(tmp_path: Path, automatic: bool) -> None:
    check_killed(tmp_path, automatic, range(100, 103))


def test_models_that_hooks_write_are_left_out(tmp_path: Path) -> None:
    accelerator = Accelerator()
    first, second = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
    write_run_state(accelerator, tmp_path, skipped={0})
    assert not (tmp_path / "model.safetensors").exists()
    before = first.weight.item()
    expected = second.weight.item()
    with torch.no_grad():
        second.weight.zero_()
    read_run_state(accelerator, tmp_path, models=[1])
    assert (first.weight.item(), second.weight.item()) == (before, expected)


def test_a_process_that_was_not_there_takes_the_place_of_process_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(Accelerator())
    run.epoch()
    write_run_state(run.accelerator, tmp_path)
    fresh_states()
    again = Run(Accelerator())
    again.accelerator.state._partial.process_index = 1
    read_run_state(again.accelerator, tmp_path)
    assert again.loader.iteration == 1
    assert "random_states_1.pkl is not in the checkpoint" in caplog.text


def test_a_checkpoint_of_accelerate_is_read(tmp_path: Path) -> None:
    run = Run(Accelerator())
    run.epoch()
    write_run_state(run.accelerator, tmp_path)
    (tmp_path / "checkpoint.json").unlink()
    weights = run.weights()
    run.accelerator.step = 5
    states = {
        "step": 5,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, tmp_path / "random_states_0.pkl")
    drawn = (random.random(), np.random.rand(), torch.rand(()).item())
    fresh_states()
    again = Run(Accelerator())
    read_run_state(again.accelerator, tmp_path)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == drawn
    assert torch.equal(again.weights(), weights)
    assert again.accelerator.step == 5
    assert again.schedule.get_last_lr() == run.schedule.get_last_lr()


def _as_accelerate_saves(folder: Path, loader_state: object) -> None:
    states = {
        "step": 0,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, folder / "random_states_0.pkl")
    torch.save(loader_state, folder / "dl_state_dict.bin")


def test_stateful_loaders_go_on_where_accelerate_saved_them(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    saved = torchdata.StatefulDataLoader(range(12), batch_size=2)
    batches = iter(saved)
    for _ in range(2):
        next(batches)
    _as_accelerate_saves(tmp_path, {**saved.state_dict(), "_iterator_finished": False})
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2))
    read_run_state(accelerator, tmp_path)
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert len(list(loader)) == 6


@pytest.mark.slow
def test_a_saved_state_of_a_loader_that_is_not_stateful_now_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _as_accelerate_saves(tmp_path, {"_num_yielded": 2})
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(4), batch_size=2))
    read_run_state(accelerator, tmp_path)
    assert "dl_state_dict.bin is not read: data loader 0 is not a stateful one" in caplog.text
    assert len(list(loader)) == 2


def test_saving_inside_a_window_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with accelerator.accumulate(), caplog.at_level(logging.WARNING):
        write_run_state(accelerator, tmp_path)
    assert "in the middle of an accumulation window" in caplog.text
