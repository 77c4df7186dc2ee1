"""The values that GET /plan and GET /metrics report: the plan, bytes by device, streaming, the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bigmodel.devices import DISK, HOST, max_memory_allocated, memory_allocated
from bigmodel.errors import DeviceError
from bigmodel.limits import KV_SPARE_PAGES
from bigmodel.plan.result.speculation import SPECULATION
from bigmodel.plan.result.stages import STAGES
from bigmodel.server.engine.budget import plan_devices
from bigmodel.server.engine.compute.planned_draft import PlannedDrafter
from bigmodel.server.engine.engine import Engine
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from bigmodel.server.engine.kv.tiers import PageTiers
from bigmodel.server.http.state import ServerState
from bigmodel.server.loading import Loading
from bigmodel.server.models.budgets import shown_device
from bigmodel.server.models.running import RunningModel
from bigmodel.server.models.served import ServedModel

EXPERTS = ", experts"
"""Ends the name of an entry of `streamed` for experts that are fetched one by one, behind that of their device."""


class OwnReports:
    """The :class:`.state.Reporter` of a server that is alone."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def metrics(self) -> bytes:
        """Metrics in the format of Prometheus."""
        text: bytes = self._state.metrics.render()
        return text

    def plan(self, model: str | None = None) -> dict[str, Any]:
        """The body of GET /plan; ``replicas`` lists the servers that answer together, here none.

        Where there are several models, ``models`` lists each with its state and its share of the budgets.
        """
        state = self._state
        served = state.first if model is None else state.models[model]
        shown = {"model": served.name, **view(served), "replicas": []}
        if state.several:
            shown["models"] = [_share(each) for each in state.models.values()]
            shown["budgets"] = _budgets(state)
        return shown


def _budgets(state: ServerState) -> list[dict[str, Any]]:
    """Bytes that each device may hold of all models."""
    return [{"device": shown_device(key), "bytes": size} for key, size in state.pool.budgets.items()]


def _share(served: ServedModel) -> dict[str, Any]:
    """Whether a model is loaded, the progress of its load, and most bytes that it takes of each device."""
    there = "loading" if served.bringing else "unloading" if served.closing else "unloaded"
    loading = served.loading if served.bringing else Loading("")
    return {
        "name": served.name,
        "state": "loaded" if served.usable else there,
        "stage": loading.stage,
        "progress": loading.fraction,
        "claimed": [{"device": shown_device(key), "bytes": size} for key, size in served.claimed.items()],
    }


def view(served: ServedModel) -> dict[str, Any]:
    """The plan, bytes per device, streamed bytes and the engine's numbers, as JSON types."""
    with served.reading() as running:
        if running is None:
            return {"plan": None, "devices": [], "streamed": [], "engine": None, "images": False}
        return {
            "plan": None if running.plan is None else json.loads(running.plan.to_json()),
            "devices": devices(running, served.loading.before),
            "streamed": streamed(running),
            "engine": _engine(running.engine),
            "images": running.images is not None,
        }


def _engine(engine: Engine) -> dict[str, Any]:
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
        "speculation": speculation(engine),
        "stages": stages(engine),
        "preemptions": scheduler.preemptions,
        "generated_tokens": core.counts.generated,
        "steps": core.steps,
    }


def speculation(engine: Engine) -> dict[str, Any] | None:
    """Tokens proposed for each sequence when one runs and when as many run as may, and the steps in which none were as
    that was predicted to be slower; None where the plan does not decide it."""
    drafter = engine.core.drafter
    if not isinstance(drafter, PlannedDrafter):
        return None
    most = engine.core.scheduler.max_sequences
    return {"alone": drafter.count(1), "together": drafter.count(most), "skipped_steps": drafter.skipped}


def devices(running: RunningModel, before: Mapping[str, int]) -> list[dict[str, Any]]:
    """One entry per device that holds part of the model, all numbers in bytes (None where unknown).

    ``weights``: parameters and buffers, each counted once; ``kv_used`` and ``kv_capacity``: keys and values;
    ``predicted``: the plan's total, and ``planned`` its parts; ``budget``: the plan's limit; ``allocated`` and
    ``peak``: the device's own counters; ``before``: allocated before the model was loaded (programs, libraries).
    """
    planned = plan_devices(running.plan)
    names = list(dict.fromkeys([*running.weights, *planned]))
    return [_entry(running, name, planned.get(name), before) for name in names]


def streamed(running: RunningModel) -> list[dict[str, Any]]:
    """Streaming counters by device: bytes fetched from RAM and disk, seconds waited; empty if nothing streams.

    Experts that are fetched one by one are apart, by device; ``kv`` are keys and values of all devices.
    """
    stats = getattr(running.model, "dispatch_stats", None)
    found: list[dict[str, Any]] = []
    for key, counters in ({} if stats is None else stats()).items():
        if key == "experts":
            found += [{"device": device + EXPERTS, **own} for device, own in counters.items()]
        elif key not in (SPECULATION, STAGES):
            found.append({"device": key, **counters})
    return found


def stages(engine: Engine) -> dict[str, Any] | None:
    """Steps in flight at most and now, and of each device with stages the seconds in which any were in flight, those
    in which it had one, and the share of idle ones; None for an engine with one step at a time."""
    core = engine.core
    if core.in_flight is None:
        return None
    figures = core.in_flight.pipeline.times.figures()
    return {
        "most": core.in_flight.most,
        "now": core.steps_now,
        "devices": [{"device": device, **each} for device, each in figures.items()],
    }


def _entry(running: RunningModel, name: str, planned: Any, before: Mapping[str, int]) -> dict[str, Any]:
    weights = running.weights.get(name, 0)
    entry: dict[str, Any] = {"device": name, "weights": weights, "predicted": None, "planned": None, "budget": None}
    if planned is not None:
        entry["predicted"] = int(planned.total)
        entry["planned"] = {
            "weights": int(planned.weights + planned.buffers),
            "kv": int(planned.kv_cache),
            "other": int(planned.activations + planned.workspace + planned.slots),
        }
        entry["budget"] = None if planned.budget is None else int(planned.budget)
    entry.update(_kv(running.engine, name), **_counters(name), before=before.get(name))
    return entry


def _kv(engine: Engine, name: str) -> dict[str, int]:
    per_token, pool = engine.kv_bytes_per_token.get(name, 0), engine.core.scheduler.pool
    tiers = None if engine.pages is None else engine.pages.tiers
    if tiers is not None and name in (HOST, DISK):
        return _kv_of_tier(engine, tiers, name)
    return {"kv_used": per_token * pool.used, "kv_capacity": per_token * pool.capacity}


def _kv_of_tier(engine: Engine, tiers: PageTiers, name: str) -> dict[str, int]:
    """Those of the host, whose older pages are on disk."""
    page = PROMPT_BLOCK * engine.kv_bytes_per_token.get(HOST, 0)
    in_ram, on_disk = tiers.used
    beyond = engine.core.scheduler.pool.capacity // PROMPT_BLOCK - tiers.table.frames + KV_SPARE_PAGES
    used, most = (in_ram, tiers.table.frames) if name == HOST else (on_disk, beyond)
    return {"kv_used": page * used, "kv_capacity": page * most}


def _counters(name: str) -> dict[str, int | None]:
    if name == "disk":
        return {"allocated": None, "peak": None}
    allocated = memory_allocated(name)  # before the peak, which is then not less
    try:
        return {"allocated": allocated, "peak": max_memory_allocated(name)}
    except DeviceError:  # the device records none: mps, or a host with a poor /proc
        return {"allocated": allocated, "peak": None}
