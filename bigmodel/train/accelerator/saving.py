"""Saving models for use, and other objects."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bigmodel.devices import release_cached_memory
from bigmodel.train.accelerator.base import AcceleratorCore
from bigmodel.train.files.objects import save_any
from bigmodel.train.files.weights import write_safetensors
from bigmodel.train.unwrapping import bare_model


class Saving(AcceleratorCore):
    """Writing what others will read."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a model, gathered where it is sharded. Every process must call it."""
        inner = bare_model(model, lambda wrapped: wrapped, keep_torch_compile=False)
        return self.strategy.state_dict(inner, unwrap=unwrap)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object on the main process, whole or not at all.

        Args:
            f: the file; folders on its way are made.
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
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights, in shards, as `from_pretrained` and `load_checkpoint_and_dispatch` read them.

        Every process must call it.

        Args:
            model: the prepared model, or the bare one.
            max_shard_size: bytes of one file at most, as a number or like "5GB".
            safe_serialization: safetensors instead of `torch.save`'s format.
        """
        inner = bare_model(model, lambda wrapped: wrapped, keep_torch_compile=False)
        directory = self._folder(save_directory)
        self.strategy.export_model(
            inner, Path(directory), max_shard_size, safe_serialization=safe_serialization, writes=self._writes_files
        )
        self.wait_for_everyone()

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything prepared, collect garbage and empty the device's cache.

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
