"""Bytes per device: what the model holds there, what the plan predicted, what is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bigmodel.checkpoint.mapping import mapped_region
from bigmodel.devices import max_memory_allocated, memory_allocated, normalize_device
from bigmodel.server.engine.budget import plan_devices

if TYPE_CHECKING:
    from bigmodel.server.state import ServerState


def devices(state: ServerState) -> list[dict[str, Any]]:
    """One entry per device that holds part of the model, all numbers in bytes (None where unknown).

    ``weights``: of parameters and buffers there, each counted once; ``kv_used`` and ``kv_capacity``: keys and
    values; ``predicted``: the plan's total, and ``planned`` what it is made of; ``budget``: what the plan was
    allowed; ``allocated`` and ``peak``: what the device's own counters say; ``before``: what was allocated before
    the model came (programs, libraries).
    """
    if state.model is None:
        return []
    if state.weights is None:  # placement does not change while the model is served
        state.weights = weight_bytes(state.model)
    weights = state.weights
    planned = plan_devices(state.plan)
    names = list(dict.fromkeys([*weights, *planned]))
    return [_entry(state, name, weights.get(name, 0), planned.get(name)) for name in names]


def weight_bytes(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of parameters and buffers per device, "disk" for views of a checkpoint file; tied ones once."""
    seen: set[tuple[str, int]] = set()
    total: dict[str, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        # Wrapper tensors of accelerators written in Python have no address of their own.
        addressed = tensor.device.type in ("cpu", "cuda")
        key = (str(tensor.device), tensor.data_ptr() if addressed else id(tensor))
        if key in seen or not tensor.nbytes:
            continue
        seen.add(key)
        name = _holder(tensor)
        total[name] = total.get(name, 0) + tensor.nbytes
    return total


def streamed(state: ServerState) -> list[dict[str, Any]]:
    """What streaming did, by device: bytes fetched from RAM and disk, seconds waited; empty if nothing streams."""
    stats = getattr(state.model, "dispatch_stats", None)
    if stats is None:
        return []
    return [{"device": device, **counters} for device, counters in stats().items()]


def _holder(tensor: torch.Tensor) -> str:
    """The name of what holds a tensor's bytes: its device, or "disk" for a view of a checkpoint file."""
    if mapped_region(tensor) is not None:
        return "disk"
    return normalize_device(tensor.device)


def _entry(state: ServerState, name: str, weights: int, planned: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"device": name, "weights": weights, "predicted": None, "planned": None, "budget": None}
    if planned is not None:
        entry["predicted"] = int(planned.total)
        entry["planned"] = {
            "weights": int(planned.weights + planned.buffers),
            "kv": int(planned.kv_cache),
            "other": int(planned.activations + planned.workspace + planned.slots),
        }
        entry["budget"] = None if planned.budget is None else int(planned.budget)
    entry.update(_kv(state, name), **_counters(name), before=state.loading.before.get(name))
    return entry


def _kv(state: ServerState, name: str) -> dict[str, int]:
    if state.engine is None:
        return {"kv_used": 0, "kv_capacity": 0}
    per_token = state.engine.kv_bytes_per_token.get(name, 0)
    pool = state.engine.core.scheduler.pool
    return {"kv_used": per_token * pool.used, "kv_capacity": per_token * pool.capacity}


def _counters(name: str) -> dict[str, int | None]:
    if name == "disk":
        return {"allocated": None, "peak": None}
    return {"allocated": memory_allocated(name), "peak": max_memory_allocated(name)}
