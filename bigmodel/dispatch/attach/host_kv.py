"""Has parts of a model keep their keys and values on the host, in every cache of transformers that they are given."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...devices.pinned import empty_weights
from ...plan import Plan
from ...profile.model.units import layer_indices
from ..streaming.host_kv import KVFetchers
from .dispatched import Dispatched
from .pinned_memory import PinnedBudget


def keep_kv_on_host(modules: Mapping[str, nn.Module], plan: Plan, pinned: PinnedBudget, result: Dispatched) -> None:
    """Attach a hook to each part whose keys and values the plan has on the host.

    Args:
        modules: All modules of the model, by name.
        plan: The plan.
        pinned: What may still be pinned.
        result: Takes the hooks' removal, and the fetchers for its counters.
    """
    if not plan.kv_on_host:
        return
    from .host_kv_cache import KVOnHost

    def allocate(nbytes: int) -> torch.Tensor:
        return empty_weights(nbytes, pinned.take(nbytes))

    result.kv = KVFetchers(plan.kv_slots, plan.context_length, plan.batch_size, allocate)
    for name in plan.kv_on_host:
        module = modules[name]
        indices = layer_indices(module)
        result.kv.layers |= indices
        hook = KVOnHost(result.kv, indices)
        result.releases.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
