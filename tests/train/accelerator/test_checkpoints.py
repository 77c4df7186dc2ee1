"""save_state and load_state resume a run bit for bit; saving models and objects; freeing memory."""

from __future__ import annotations

import errno
import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bigmodel.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, TrainError
from bigmodel.train import Accelerator, DataLoaderConfiguration, DistributedType, ProjectConfiguration
from tests.train.accelerator.models import Run
from tests.train.multiprocess import fresh_states, on_ranks


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def interrupted(folder: Path, at: int, options: dict[str, Any], loader: dict[str, Any]) -> None:
    """Train two epochs and a half, keep the state in the middle; train again from there, and compare."""
    run = Run(Accelerator(**options), **loader)
    run.epoch()
    losses = []
    for number, (x, y) in enumerate(run.loader, 1):
        losses.append(run.step(x, y))
        if number == at:
            run.accelerator.save_state(folder)
    losses += run.epoch()
    rest, weights, rate = losses[at:], run.weights(), run.schedule.get_last_lr()

    fresh_states()
    again = Run(Accelerator(**options), **loader)
    again.epoch()  # something else has happened to everything
    again.accelerator.load_state(folder)
    by_itself = again.accelerator.use_stateful_dataloader
    remaining = again.loader if by_itself else again.accelerator.skip_first_batches(again.loader, at)
    assert again.epoch(remaining) + again.epoch() == rest
    assert torch.equal(again.weights(), weights)
    assert again.schedule.get_last_lr() == rate


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulating": ({"gradient_accumulation_steps": 2}, {}),
    "fp16": ({"mixed_precision": "fp16"}, {}),
    "workers": ({}, {"num_workers": 1}),
    "seedable": ({"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}, {}),
    "split": ({"dataloader_config": DataLoaderConfiguration(split_batches=True)}, {}),
    "dispatched": ({"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long] * (name == "workers")) for name in OPTIONS]
)
def test_a_run_is_resumed_in_the_middle_of_an_epoch(tmp_path: Path, name: str) -> None:
    interrupted(tmp_path / "state", 4, *OPTIONS[name])


@pytest.mark.slow
def test_a_stateful_loader_needs_no_skipping(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    interrupted(tmp_path, 4, {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)}, {})


@pytest.mark.parametrize("at", [1, 6])
def test_the_first_and_the_last_batch_are_middles_too(tmp_path: Path, at: int) -> None:
    interrupted(tmp_path, at, {}, {})


@pytest.mark.slow
@on_ranks
def test_two_processes_are_resumed(folder: Path) -> None:
    for name, (options, loader) in OPTIONS.items():
        fresh_states()
        interrupted(folder / name, 2, options, loader)


def test_a_checkpoint_between_epochs_goes_on_with_a_new_order(tmp_path: Path) -> None:
    run = Run(Accelerator())
    run.epoch()
    run.accelerator.save_state(tmp_path)
    expected = run.epoch()
    fresh_states()
    again = Run(Accelerator())
    again.accelerator.load_state(tmp_path)
    assert again.epoch() == expected


@pytest.mark.parametrize("safe", [True, False])
def test_the_files_are_those_of_accelerate(tmp_path: Path, safe: bool) -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    run = Run(accelerator)
    accelerator.register_for_checkpointing(Counter(3))
    second = nn.Linear(1, 1)
    accelerator.prepare(second, torch.optim.SGD(second.parameters()))
    assert accelerator.save_state(tmp_path, safe_serialization=safe) == str(tmp_path)
    model = ["model.safetensors", "model_1.safetensors"] if safe else ["pytorch_model.bin", "pytorch_model_1.bin"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [
            *model,
            "checkpoint.json",
            "custom_checkpoint_0.pkl",
            "optimizer.bin",
            "optimizer_1.bin",
            "random_states_0.pkl",
            "scaler.pt",
            "scheduler.bin",
        ]
    )
    weights = run.weights()
    run.epoch()
    accelerator.load_state(tmp_path)
    assert torch.equal(run.weights(), weights)


def test_registered_objects_come_back(tmp_path: Path) -> None:
    accelerator = Accelerator()
    counter = Counter(7)
    accelerator.register_for_checkpointing(counter)
    accelerator.save_state(tmp_path)
    counter.count = 0
    accelerator.load_state(tmp_path)
    assert counter.count == 7
    with pytest.raises(TrainError, match=r"objects to checkpoint need .*index 1 \(int\)"):
        accelerator.register_for_checkpointing(Counter(), 3)


def test_automatic_names_are_numbered_and_limited(tmp_path: Path) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=config)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for counter.count in range(4):
        accelerator.save_state()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    assert accelerator.save_iteration == 4

    fresh_states()
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2, iteration=3)
    accelerator = Accelerator(project_config=config)
    accelerator.register_for_checkpointing(counter)
    with pytest.raises(TrainError, match="checkpoint_3 exists"):
        accelerator.save_state()
    accelerator.load_state()
    assert (counter.count, accelerator.save_iteration) == (3, 4)


def test_a_folder_must_be_known_and_there(tmp_path: Path) -> None:
    accelerator = Accelerator()
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(TrainError, match="_dir, or a ProjectConfiguration"):
            call()
    with pytest.raises(CheckpointNotFoundError, match="missing"):
        accelerator.load_state(tmp_path / "missing")
    with pytest.raises(TrainError, match="needs a project_dir"):
        Accelerator(project_config=ProjectConfiguration(automatic_checkpoint_naming=True)).save_state()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    Run(Accelerator()).accelerator.save_state(tmp_path)
    fresh_states()
    accelerator = Accelerator()
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(CheckpointMismatchError, match="1 optimizers were saved, 0 are prepared"):
        accelerator.load_state(tmp_path)


def test_hooks_may_write_and_read_models_themselves(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    calls = []

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        calls.append(("save", models == [model], list(weights[0])))
        weights.pop()
        (Path(folder) / "mine").write_text("x")

    def load(models: list[nn.Module], folder: str) -> None:
        calls.append(("load", (Path(folder) / "mine").read_text(), models.pop() is model))

    handles = [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]
    accelerator.save_state(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    accelerator.load_state(tmp_path)
    assert calls == [("save", True, ["weight", "bias"]), ("load", "x", True)]
    for handle in handles:
        handle.remove()
    accelerator.save_state(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert len(calls) == 2


@pytest.mark.slow
@on_ranks
def test_one_of_two_processes_finishes_what_a_killed_one_had_begun_to_move(folder: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    state = folder / "state"
    for value in (1.0, 2.0):
        nn.init.constant_(accelerator.unwrap_model(model).weight, value)
        accelerator.save_state(state)
    if accelerator.is_main_process:
        # The second save is taken back to the moment at which it counted, but had moved nothing yet.
        (state / ".partial").mkdir()
        (state / "model.safetensors").rename(state / ".partial" / "model.safetensors")
        (state / ".moves.json").write_text(json.dumps({"move": ["model.safetensors"], "remove": []}))
    accelerator.wait_for_everyone()
    nn.init.constant_(accelerator.unwrap_model(model).weight, 3.0)
    accelerator.load_state(state)
    assert accelerator.unwrap_model(model).weight.item() == 2.0
    assert not (state / ".partial").exists()


@pytest.mark.slow
def test_a_model_is_saved_in_shards_and_loads_again(tmp_path: Path) -> None:
    accelerator = Accelerator(dynamo_backend="eager")
    bare = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    accelerator.save_model(accelerator.prepare(bare), tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 2
    state = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        name: tensor.tolist() for name, tensor in bare.state_dict().items()
    }


def test_a_model_can_be_saved_in_pytorch_s_format(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.save_model(nn.Linear(2, 2), tmp_path, safe_serialization=False)
    assert set(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)) == {"weight", "bias"}


def test_the_state_dict_is_the_bare_model_s() -> None:
    accelerator = Accelerator(dynamo_backend="eager")
    model = accelerator.prepare(nn.Linear(2, 2))
    assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]


@pytest.mark.parametrize("safe", [False, True])
def test_objects_are_saved(tmp_path: Path, safe: bool) -> None:
    Accelerator().save({"x": torch.ones(2)}, tmp_path / "o", safe_serialization=safe)
    back = load_file(tmp_path / "o") if safe else torch.load(tmp_path / "o", weights_only=True)
    assert back["x"].tolist() == [1.0, 1.0]


def test_what_was_prepared_is_forgotten() -> None:
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    gone = weakref.ref(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert (model, optimizer) == (None, None)
    assert gone() is None
    assert accelerator.clear() == []


@on_ranks
@pytest.mark.slow
def test_each_process_may_name_a_folder_of_its_own(folder: Path) -> None:
    run = Run(Accelerator())
    run.epoch()
    own = folder / str(run.accelerator.process_index)
    run.accelerator.save_state(own)
    expected = run.epoch()
    fresh_states()
    again = Run(Accelerator())
    again.accelerator.load_state(own)
    assert again.epoch() == expected


@pytest.mark.slow
@on_ranks
def test_processes_that_split_their_models_need_one_folder(folder: Path) -> None:
    accelerator = Accelerator()
    accelerator.strategy.distributed_type = DistributedType.FSDP  # type: ignore[misc]
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(TrainError, match="the processes name different folders"):
            call(folder / str(accelerator.process_index))


def disk_full(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@on_ranks
def test_when_the_disk_of_one_process_is_full_all_processes_raise_at_once(folder: Path) -> None:
    run = Run(Accelerator())
    rank = run.accelerator.process_index
    run.accelerator.save_state(folder / "state")
    weights = run.weights()
    run.epoch()
    for full in (0, 1):
        expected = OSError if rank == full else CheckpointError
        calls = [(run.accelerator.save_state, folder / "state"), (run.accelerator.save_state, folder / str(rank))]
        if full == 0:  # the process that writes for all
            calls.append((lambda target: run.accelerator.save_model(run.model, target), folder / "model"))
        for call, target in calls:
            with pytest.MonkeyPatch.context() as patch:
                if rank == full:
                    patch.setattr(os, "fsync", disk_full)
                with pytest.raises(expected, match="No space left on device"):
                    call(target)
    assert not (folder / "0").exists()
    run.accelerator.load_state(folder / "state")
    assert torch.equal(run.weights(), weights)


@pytest.mark.slow
@on_ranks
def test_when_one_process_cannot_read_all_processes_raise_at_once(folder: Path) -> None:
    run = Run(Accelerator())
    rank = run.accelerator.process_index
    own = folder / str(rank)
    run.accelerator.save_state(own)
    for name in ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_1.pkl"):
        if rank == 1:
            (own / name).rename(own / "elsewhere")
        message = "is not there|neither" if rank == 1 else "process 1 failed with CheckpointNotFoundError"
        with pytest.raises(CheckpointError, match=message):
            run.accelerator.load_state(own)
        if rank == 1:
            (own / "elsewhere").rename(own / name)
    run.accelerator.load_state(own)


def fails(*arguments: Any) -> None:
    raise ValueError("no state")


@pytest.mark.slow
@on_ranks
def test_when_a_hook_or_loader_of_one_process_fails_all_processes_raise_at_once(folder: Path) -> None:
    run = Run(Accelerator())
    rank = run.accelerator.process_index
    run.accelerator.save_state(folder / "state")
    expected = ValueError if rank == 1 else CheckpointError
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(run.loader, "state_dict", fails)
        with pytest.raises(expected, match="no state"):
            run.accelerator.save_state(folder / "state")
    if rank == 1:
        run.accelerator.register_load_state_pre_hook(fails)
    with pytest.raises(expected, match="no state"):
        run.accelerator.load_state(folder / "state")


@on_ranks
def test_one_process_writes_for_all(folder: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_model(model, folder / "m")
    accelerator.save(accelerator.process_index, folder / "o")
    accelerator.wait_for_everyone()
    assert set(load_file(folder / "m" / "model.safetensors")) == {"weight", "bias"}
    assert torch.load(folder / "o", weights_only=True) == 0


@on_ranks
def test_the_main_process_of_each_machine_writes_where_folders_are_not_shared(folder: Path) -> None:
    accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=True))
    own = folder / str(accelerator.process_index)
    accelerator.save("x", own)
    assert own.exists() == accelerator.is_local_main_process


def test_folders_on_the_way_to_a_file_are_made(tmp_path: Path) -> None:
    Accelerator().save({"a": torch.ones(1)}, tmp_path / "not" / "there" / "last.pth")
    assert torch.load(tmp_path / "not" / "there" / "last.pth")["a"].item() == 1.0
