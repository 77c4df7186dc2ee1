"""Has parts of a model keep their keys and values on the host, in every cache of transformers that they are given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ...devices import format_size, torch_device
from ...devices.pinned import empty_weights
from ...errors import DispatchError
from ...plan import Plan, staging_memory
from ...plan.memory.host_kv import staged_kv
from ...profile.model.units import layer_indices
from ..streaming.host_kv import KVFetchers, OlderRows
from ..streaming.kv_file import KVDisk
from .dispatched import Dispatched
from .pinned_memory import PinnedBudget


def keep_kv_on_host(
    modules: Mapping[str, nn.Module], plan: Plan, pinned: PinnedBudget, result: Dispatched, folder: Path | None
) -> None:
    """Attach a hook to each part whose keys and values the plan has on the host.

    Args:
        modules: All modules of the model, by name.
        plan: The plan.
        pinned: What may still be pinned.
        result: Takes the hooks' removal, and the fetchers for its counters.
        folder: Folder for those that the plan has on disk.

    Raises:
        DispatchError: The plan has some on disk, and no folder is given.
    """
    if not plan.kv_on_host:
        return
    from .host_kv_cache import KVOnHost

    def allocate(nbytes: int) -> torch.Tensor:
        return empty_weights(nbytes, pinned.take(nbytes))

    result.kv = KVFetchers(plan.kv_slots, plan.context_length, plan.batch_size, allocate, _older(plan, folder))
    for name in plan.kv_on_host:
        module = modules[name]
        indices = layer_indices(module)
        result.kv.layers |= indices
        hook = KVOnHost(result.kv, indices)
        result.releases.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _older(plan: Plan, folder: Path | None) -> OlderRows | None:
    """Return where the plan has older keys and values on disk; None if RAM holds all."""
    if not plan.kv_on_disk:
        return None
    if folder is None:
        raise DispatchError(
            f"the plan has {format_size(plan.kv_on_disk)} of keys and values on disk: give offload_dir= "
            "(offload_folder=), a folder for them, or plan for a shorter context"
        )
    there: dict[torch.device, list[int]] = {}
    for part in plan.parts:
        if part.kv_on_disk:
            there.setdefault(torch_device(part.runs_on), []).append(part.kv_on_disk)
    staging = {
        device: staging_memory(staged_kv(sizes), plan.staging_bytes, plan.readers) for device, sizes in there.items()
    }
    return OlderRows(KVDisk(folder, plan.kv_on_disk), plan.kv_in_ram, staging, plan.readers)
