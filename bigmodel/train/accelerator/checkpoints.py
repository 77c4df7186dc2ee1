"""Saving and loading of the Accelerator: training states, models, and other objects."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from bigmodel.devices import release_cached_memory
from bigmodel.errors import CheckpointNotFoundError, TrainError
from bigmodel.limits import SHARD_SIZE
from bigmodel.train import checkpoint_folder
from bigmodel.train.accelerator.base import AcceleratorCore
from bigmodel.train.accelerator.run_state import read_run_state, write_run_state
from bigmodel.train.checkpoint_files import save_any, write_safetensors
from bigmodel.train.checkpoint_folder import raise_on_all
from bigmodel.train.collectives import gather_object
from bigmodel.train.wrappers import bare_model

_CHECKPOINTS = "checkpoints"


class Checkpoints(AcceleratorCore):
    """Saves and loads training states."""

    _save_hooks: OrderedDict[int, Callable[..., None]]
    _load_hooks: OrderedDict[int, Callable[..., None]]

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Also save and load these objects, by their `state_dict` and `load_state_dict`.

        Raises TrainError for objects without them.
        """
        lacking = [
            f"Item at index {index} ({type(obj).__name__})"
            for index, obj in enumerate(objects)
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))
        ]
        if lacking:
            names = ", ".join(lacking)
            raise TrainError(f"objects to checkpoint need state_dict and load_state_dict: {names}")
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call hook(models, weights, output_dir) before each save.

        `models` are the prepared models, `weights` their state dicts; what the hook takes out of `weights` is left for
        the hook to write.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call hook(models, input_dir) before each load; models it takes out of the list are left for it to load."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> str:
        """Write the training state to a folder, atomically.

        Models, optimizers, schedulers, data loaders, the fp16 scaler, generators and registered objects. Every process
        must call it.

        Args:
            output_dir: the folder, or one of its own for each process, which is then a whole checkpoint; with
                automatic naming `project_dir/checkpoints/checkpoint_<n>`, of which
                `total_limit` are kept. A checkpoint that is there already is replaced.
            safe_serialization: models as safetensors instead of `torch.save`'s format.

        Returns:
            The folder.

        Raises:
            TrainError: no folder is given and none is automatic, the automatic one exists, or processes that split
                their models name different folders.
            CheckpointError: another process could not write. The folder is as it was.
        """
        target = self._target(output_dir)
        writes = self._writes_for_all_in(target)
        with checkpoint_folder.replaced(target, self.state, writes) as folder:
            with raise_on_all(f"{target} was not written"):
                skipped = self._run_save_hooks(folder)
            write_run_state(self, folder, safe_serialization=safe_serialization, skipped=skipped, writes=writes)
        if self.project_configuration.automatic_checkpoint_naming:
            self.project_configuration.iteration += 1
            limit = self.project_configuration.total_limit
            with raise_on_all(f"checkpoints beyond the last {limit} were not removed"):
                if limit is not None and writes:
                    checkpoint_folder.remove_oldest(target.parent, limit)
        return str(target)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load a training state into the prepared objects, which must be prepared in the same order.

        Args:
            input_dir: the folder; with automatic naming the newest by default.
            load_kwargs: {"strict": False} loads models whose names differ.

        Raises:
            CheckpointNotFoundError: there is no checkpoint there.
            CheckpointMismatchError: it does not fit the prepared objects.
            CheckpointError: another process could not read it.
        """
        folder = self._source(input_dir)
        models = list(self._models)
        with raise_on_all(f"{folder} was not read"):
            for hook in list(self._load_hooks.values()):
                hook(models, str(folder))
        kept = [index for index, model in enumerate(self._models) if any(model is left for left in models)]
        options = {**(load_kwargs or {}), **kwargs}
        read_run_state(self, folder, strict=bool(options.get("strict", True)), models=kept)
        if self.project_configuration.automatic_checkpoint_naming:
            number = checkpoint_folder.number_of(folder)
            if number is not None:
                self.project_configuration.iteration = number + 1
        self.wait_for_everyone()

    def _target(self, output_dir: str | os.PathLike[str] | None) -> Path:
        config = self.project_configuration
        if config.automatic_checkpoint_naming:
            if config.project_dir is None:
                raise TrainError("automatic checkpoint naming needs a project_dir")
            target = self._folder(config.project_dir) / _CHECKPOINTS / f"checkpoint_{config.iteration}"
            if target.exists():
                raise TrainError(
                    f"{target} exists; load it first, or set ProjectConfiguration.iteration above the last checkpoint"
                )
            return target
        if output_dir is None:
            raise TrainError("save_state needs output_dir, or a ProjectConfiguration with automatic_checkpoint_naming")
        return self._folder(output_dir)

    def _source(self, input_dir: str | os.PathLike[str] | None) -> Path:
        config = self.project_configuration
        if input_dir is not None:
            folder = self._folder(input_dir)
        elif config.automatic_checkpoint_naming and config.project_dir is not None:
            folder = checkpoint_folder.newest(self._folder(config.project_dir) / _CHECKPOINTS)
        else:
            raise TrainError("load_state needs input_dir, or a ProjectConfiguration with automatic_checkpoint_naming")
        failure = f"{folder} was not read"
        writes = self._writes_for_all_in(folder)
        with raise_on_all(failure):
            if writes:
                checkpoint_folder.recover(folder)
        with raise_on_all(failure):
            if not folder.is_dir():
                raise CheckpointNotFoundError(f"there is no checkpoint {folder}")
        return folder

    def _writes_for_all_in(self, folder: Path) -> bool:
        """Whether this process writes what one process writes for all that name this folder. All must call it.

        Raises TrainError when processes that split their models name different folders.
        """
        machine = self.process_index - self.local_process_index if self.project_configuration.save_on_each_node else 0
        places = gather_object([(machine, str(folder.absolute()))])
        if len({path for _, path in places}) > 1 and not self.strategy.keeps_whole_models:
            raise TrainError(
                f"the processes name different folders ({places[0][1]}, ...), but {self.distributed_type.value} splits "
                "models among them; give every process the same folder"
            )
        return bool(places.index(places[self.process_index]) == self.process_index)

    def _run_save_hooks(self, folder: Path) -> set[int]:
        """Run the hooks; return the numbers of the models they have written themselves."""
        if not self._save_hooks:
            return set()
        weights = [self.strategy.state_dict(model) for model in self._models]
        before = list(weights)
        for hook in list(self._save_hooks.values()):
            hook(list(self._models), weights, str(folder))
        return {index for index, state in enumerate(before) if not any(state is left for left in weights)}


class Saving(AcceleratorCore):
    """Exports models and other objects."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a model, gathered where it is sharded. Every process must call it."""
        inner = bare_model(model, lambda wrapped: wrapped, keep_torch_compile=False)
        return self.strategy.state_dict(inner, unwrap=unwrap)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object on the main process, atomically.

        Args:
            obj: the object.
            f: the file; its parent folders are created.
            safe_serialization: write a dict of tensors as safetensors instead of `torch.save`'s format.
        """
        if not self._writes_files:
            return
        path = self._folder(f)
        path.parent.mkdir(parents=True, exist_ok=True)
        if safe_serialization and isinstance(obj, Mapping):
            write_safetensors(obj, path)
        else:
            save_any(obj, path)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = SHARD_SIZE,
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights, in shards, as `from_pretrained` and `load_checkpoint_and_dispatch` read them.

        Every process must call it.

        Args:
            model: the prepared model, or the bare one.
            max_shard_size: largest size of a file in bytes, as a number or text such as "5GB".
            safe_serialization: safetensors instead of `torch.save`'s format.

        Raises:
            CheckpointError: another process could not write.
        """
        inner = bare_model(model, lambda wrapped: wrapped, keep_torch_compile=False)
        directory = self._folder(save_directory)
        with raise_on_all(f"the model was not written to {directory}"):
            self.strategy.export_model(
                inner, directory, max_shard_size, safe_serialization=safe_serialization, writes=self._writes_files
            )

    def free_memory(self, *objects: Any) -> list[None]:
        """Drop references to all prepared objects, collect garbage and empty the device's cache.

        Returns:
            One None for each object: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        for prepared in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            prepared.clear()
        self.strategy.free()
        self.step = 0
        result = [None for _ in objects]
        del objects
        gc.collect()
        release_cached_memory()
        return result

    def clear(self, *objects: Any) -> list[None]:
        """Do as `free_memory`."""
        return self.free_memory(*objects)
