"""The values that GET /plan and GET /metrics report: the plan, bytes by device, streaming, the engine."""

from __future__ import annotations

import json
from typing import Any

import torch

from bigmodel.checkpoint.mapping import mapped_region
from bigmodel.devices import max_memory_allocated, memory_allocated, normalize_device
from bigmodel.errors import DeviceError
from bigmodel.server.engine.budget import plan_devices
from bigmodel.server.http.state import ServerState


class OwnReports:
    """The :class:`.state.Reporter` of a server that is alone."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def metrics(self) -> bytes:
        """Metrics in the format of Prometheus."""
        text: bytes = self._state.metrics.render()
        return text

    def plan(self) -> dict[str, Any]:
        """The body of GET /plan; ``replicas`` lists the servers that answer together, here none."""
        return {"model": self._state.settings.model_name, **view(self._state), "replicas": []}


def view(state: ServerState) -> dict[str, Any]:
    """The plan, bytes per device, streamed bytes and the engine's numbers, as JSON types."""
    return {
        "plan": None if state.plan is None else json.loads(state.plan.to_json()),
        "devices": devices(state),
        "streamed": streamed(state),
        "engine": _engine(state),
    }


def _engine(state: ServerState) -> dict[str, Any] | None:
    engine = state.engine
    if engine is None:
        return None
    core, scheduler = engine.core, engine.core.scheduler
    return {
        "state": engine.state.value,
        "runner": core.runner.name,
        "row_multiple": core.runner.row_multiple,
        "host_linear": core.runner.host_linear,
        "running": len(scheduler.running),
        "waiting": engine.waiting,
        "max_sequences": scheduler.max_sequences,
        "max_requests": engine.max_requests,
        "max_batch_tokens": scheduler.max_batch_tokens,
        "max_length": core.max_length,
        "kv_tokens": {"used": scheduler.pool.used, "capacity": scheduler.pool.capacity},
        "prefix_cache": {
            "blocks": len(scheduler.prefix),
            "hit_tokens": scheduler.prefix.hits,
            "looked_up_tokens": scheduler.prefix.lookups,
            "restored_tokens": None if scheduler.prefix.files is None else scheduler.prefix.files.restored,
        },
        "preemptions": scheduler.preemptions,
        "generated_tokens": core.counts.generated,
        "steps": core.steps,
    }


def devices(state: ServerState) -> list[dict[str, Any]]:
    """One entry per device that holds part of the model, all numbers in bytes (None where unknown).

    ``weights``: parameters and buffers, each counted once; ``kv_used`` and ``kv_capacity``: keys and values;
    ``predicted``: the plan's total, and ``planned`` its parts; ``budget``: the plan's limit; ``allocated`` and
    ``peak``: the device's own counters; ``before``: allocated before the model was loaded (programs, libraries).
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
    """Bytes of parameters and buffers by device, "disk" for views of a checkpoint file; tied ones once."""
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
    """Streaming counters by device: bytes fetched from RAM and disk, seconds waited; empty if nothing streams."""
    stats = getattr(state.model, "dispatch_stats", None)
    if stats is None:
        return []
    return [{"device": device, **counters} for device, counters in stats().items()]


def _holder(tensor: torch.Tensor) -> str:
    """The device that holds a tensor's bytes; "disk" for a view of a checkpoint file."""
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
    allocated = memory_allocated(name)  # before the peak, which is then not less
    try:
        return {"allocated": allocated, "peak": max_memory_allocated(name)}
    except DeviceError:  # the device records none: mps, or a host with a poor /proc
        return {"allocated": allocated, "peak": None}
