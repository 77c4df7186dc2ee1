"""How a model is dispatched, beside where."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...devices import DISK, HOST, DeviceLike, device_key, get_max_memory, parse_size
from ...profile.model.quantized import check_offload_dtype
from .tensors import Placement


@dataclass(frozen=True)
class Options:
    """What dispatching may be told beside the device map.

    Attributes:
        offload_buffers: Keep buffers of offloaded modules on the host too and stream them.
        skip_keys: Keyword arguments that are never moved between devices.
        no_split_module_classes: Classes that are streamed as a whole; None finds them.
        force_hooks: Attach to the root even where nothing needs it.
        dtype: What floating-point weights are cast to on their way to the device; None keeps theirs.
        slots: How many streamed blocks may be on the device at once.
        expert_cache: Bytes of each device for experts that are fetched one by one; None takes what streaming whole
            layers of them would take.
        budgets: Bytes that may be taken of each device, as the user said; None where nothing was said. With one for the
            host, weights on disk that the host computes with are dropped from memory behind their use for it to hold.
        offload_dtype: What streamed weights are quantised to on their way, one of `OFFLOAD_DTYPES`; None: not at all.
        pinned_memory: Bytes of host memory that may be pinned for a GPU to copy from; None takes half of it.
        offload_folder: Where weights for the disk are written that lie in no file as they are wanted.
    """

    offload_buffers: bool = False
    skip_keys: Collection[str] | str | None = None
    no_split_module_classes: Collection[str] | None = None
    force_hooks: bool = False
    dtype: torch.dtype | None = None
    slots: int = 2
    expert_cache: int | None = None
    budgets: Mapping[int | str, int] | None = None
    offload_dtype: str | None = None
    offload_folder: Path | None = None
    pinned_memory: int | None = None

    @classmethod
    def read(
        cls,
        *,
        expert_cache: int | str | None = None,
        pinned_memory: int | str | None = None,
        max_memory: Mapping[DeviceLike, int | str] | None = None,
        offload_dtype: str | None = None,
        **others: Any,
    ) -> Options:
        """Return options as people give them: sizes in bytes or as text, budgets by whatever names devices have.

        Args:
            expert_cache: See the attributes.
            pinned_memory: Likewise.
            max_memory: The budgets.
            offload_dtype: See the attributes.
            others: Attributes as they are.

        Raises:
            SizeError: A size is none.
            PlanError: `offload_dtype` is none of those it may be.
        """
        return cls(
            expert_cache=size_or_none(expert_cache),
            pinned_memory=size_or_none(pinned_memory),
            budgets=None if max_memory is None else get_max_memory(max_memory),
            offload_dtype=check_offload_dtype(offload_dtype),
            **others,
        )

    def budget(self, device: DeviceLike) -> int | None:
        """Return the bytes that may be taken of `device`; None where nothing was said."""
        return None if self.budgets is None else self.budgets.get(device_key(device))

    def reads_ahead(self, placement: Placement) -> bool:
        """Whether what the host computes with is brought into its budget in turns, as some of it lies on disk."""
        on_disk = DISK in placement.devices.values()
        return on_disk and placement.main_device == HOST and self.budget(HOST) is not None


def size_or_none(size: int | str | None) -> int | None:
    """Return a size in bytes; None stays None."""
    return None if size is None else parse_size(size)
