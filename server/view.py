"""What /plan shows of a server: the plan, what lives where, what is streamed, and what the engine is doing."""

from __future__ import annotations

import json
from typing import Any

from bigmodel.server.placement import devices, streamed
from bigmodel.server.state import ServerState


def view(state: ServerState) -> dict[str, Any]:
    """The plan, bytes per device, streamed bytes and the engine's numbers, as JSON's own types."""
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
        },
        "preemptions": scheduler.preemptions,
        "generated_tokens": core.counts.generated,
        "steps": core.steps,
    }
