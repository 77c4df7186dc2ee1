"""The content of a training checkpoint: one file for each prepared object, and one for each process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigmodel.errors import CheckpointMismatchError
from bigmodel.train import checkpoint_folder
from bigmodel.train.accelerator.base import AcceleratorCore
from bigmodel.train.checkpoint_files import load_object, numbered, save_object
from bigmodel.train.checkpoint_folder import raise_on_all
from bigmodel.train.optimizer import AcceleratedOptimizer
from bigmodel.train.seeding import full_state, set_full_state
from bigmodel.train.wrappers import bare_model

logger = logging.getLogger(__name__)

_SCHEDULER = "scheduler.bin"
_SCALER = "scaler.pt"
_STATEFUL_LOADER = "dl_state_dict.bin"
"""Accelerate's name of a stateful loader's state."""
_FORMAT = 1


def write_run_state(
    accelerator: AcceleratorCore,
    folder: Path,
    *,
    safe_serialization: bool = True,
    skipped: set[int] | None = None,
    writes: bool = True,
) -> None:
    """Write everything to `folder`. Every process must call it.

    Args:
        skipped: numbers of models that hooks have written.
        writes: whether this process writes what one process writes for all that share `folder`.

    Raises:
        CheckpointError: another process could not write its part.
    """
    failure = f"the training state in {folder} was not written"
    if not accelerator.gradient_state.sync_gradients:
        logger.warning("saved in the middle of an accumulation window: its gradients so far are not in the checkpoint")
    strategy = accelerator.strategy
    for index, model in enumerate(accelerator._models):
        if index not in (skipped or set()):
            with raise_on_all(failure):
                strategy.save_model(_inner(model), folder, index, safe_serialization=safe_serialization, writes=writes)
    for index, optimizer in enumerate(accelerator._optimizers):
        with raise_on_all(failure):
            strategy.save_optimizer(
                optimizer.optimizer, _model_of(accelerator, optimizer), folder, index, writes=writes
            )
    with raise_on_all(failure):
        own = {
            "generators": full_state(),
            "step": accelerator.step,
            "data_loaders": [loader.state_dict() for loader in accelerator._dataloaders],
        }
        if writes:
            _write_shared(accelerator, folder)
        save_object(own, folder / _own_name(accelerator.process_index))
    with raise_on_all(failure):
        if writes:
            checkpoint_folder.describe(folder, {"format": _FORMAT, **_counts(accelerator)})


def _write_shared(accelerator: AcceleratorCore, folder: Path) -> None:
    for index, scheduler in enumerate(accelerator._schedulers):
        save_object(scheduler.state_dict(), folder / numbered(_SCHEDULER, index))
    if accelerator._scaler is not None:
        save_object(accelerator._scaler.state_dict(), folder / _SCALER)
    for index, custom in enumerate(accelerator._custom_objects):
        save_object(custom.state_dict(), folder / f"custom_checkpoint_{index}.pkl")


def read_run_state(
    accelerator: AcceleratorCore, folder: Path, *, strict: bool = True, models: Sequence[int] | None = None
) -> None:
    """Read everything back, generators last. Every process must call it.

    Args:
        strict: refuse models with other names.
        models: numbers of the models to read; the others are left to hooks.

    Raises:
        CheckpointMismatchError: the checkpoint holds another number of models, optimizers, ... than are prepared.
        CheckpointError: another process could not read it.
    """
    failure = f"the training state in {folder} was not read"
    with raise_on_all(failure):
        _check_counts(accelerator, folder)
    strategy = accelerator.strategy
    for index, model in enumerate(accelerator._models):
        if models is None or index in models:
            with raise_on_all(failure):
                strategy.load_model(_inner(model), folder, index, strict=strict)
    for index, optimizer in enumerate(accelerator._optimizers):
        with raise_on_all(failure):
            strategy.load_optimizer(optimizer.optimizer, _model_of(accelerator, optimizer), folder, index)
        optimizer._step_was_skipped = False
    with raise_on_all(failure):
        _read_shared(accelerator, folder)
        _read_own(accelerator, folder)


def _read_shared(accelerator: AcceleratorCore, folder: Path) -> None:
    for index, scheduler in enumerate(accelerator._schedulers):
        scheduler.load_state_dict(load_object(folder / numbered(_SCHEDULER, index)))
    if accelerator._scaler is not None:
        accelerator._scaler.load_state_dict(load_object(folder / _SCALER))
    for index, custom in enumerate(accelerator._custom_objects):
        custom.load_state_dict(load_object(folder / f"custom_checkpoint_{index}.pkl"))


def _read_own(accelerator: AcceleratorCore, folder: Path) -> None:
    path = folder / _own_name(accelerator.process_index)
    mine = path.is_file()
    if not mine:
        logger.warning("%s is not in the checkpoint; the state of process 0 is taken", path.name)
        path = folder / _own_name(0)
    own = load_object(path)
    accelerator.step = own["step"]
    if "data_loaders" in own:
        for loader, state in zip(accelerator._dataloaders, own["data_loaders"], strict=True):
            loader.load_state_dict(state)
    else:
        _read_loaders_of_accelerate(accelerator, folder)
    if mine:
        set_full_state(own["generators"] if "generators" in own else _generators_of_accelerate(own))


def _read_loaders_of_accelerate(accelerator: AcceleratorCore, folder: Path) -> None:
    """Have stateful loaders go on where accelerate saved them; it saves nothing of the others."""
    for index, loader in enumerate(accelerator._dataloaders):
        path = folder / numbered(_STATEFUL_LOADER, index)
        if path.is_file() and loader.use_stateful_dataloader:
            loader.load_loader_state(load_object(path))
        elif path.is_file():
            logger.warning("%s is not read: data loader %d is not a stateful one, and begins anew", path, index)


def _generators_of_accelerate(own: dict[str, Any]) -> dict[str, Any]:
    """Return the generators' states that a file of accelerate holds, as those of `full_state`."""
    name, keys, *rest = own["numpy_random_seed"]
    found = {
        "python": own["random_state"],
        "numpy": (name, torch.from_numpy(keys.astype("int64")), *rest),
        "torch": own["torch_manual_seed"],
    }
    return found | ({"cuda": own["torch_cuda_manual_seed"]} if "torch_cuda_manual_seed" in own else {})


def _own_name(process_index: int) -> str:
    return f"random_states_{process_index}.pkl"


def _counts(accelerator: AcceleratorCore) -> dict[str, Any]:
    return {
        "processes": accelerator.num_processes,
        "models": len(accelerator._models),
        "optimizers": len(accelerator._optimizers),
        "schedulers": len(accelerator._schedulers),
        "data_loaders": len(accelerator._dataloaders),
        "custom_objects": len(accelerator._custom_objects),
    }


def _check_counts(accelerator: AcceleratorCore, folder: Path) -> None:
    saved = checkpoint_folder.description_of(folder)
    wrong = [
        f"{saved[name]} {name.replace('_', ' ')} were saved, {count} are prepared"
        for name, count in _counts(accelerator).items()
        if name != "processes" and saved.get(name, count) != count
    ]
    if wrong:
        raise CheckpointMismatchError(f"{folder} does not fit this run: {'; '.join(wrong)}")


def _inner(model: nn.Module) -> nn.Module:
    return bare_model(model, lambda wrapped: wrapped, keep_torch_compile=False)


def _model_of(accelerator: AcceleratorCore, optimizer: AcceleratedOptimizer) -> nn.Module | None:
    """Return the prepared model that the optimizer's first parameter belongs to."""
    first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    for model in accelerator._models:
        if any(parameter is first for parameter in model.parameters()):
            return _inner(model)
    return None
