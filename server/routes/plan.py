"""GET /plan: what lives where, what was predicted, what is used, and what the engine is doing."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request

from server.placement import devices, streamed
from server.state import ServerState, state_of

router = APIRouter()


@router.get("/plan")
async def plan(http: Request, parts: bool = True) -> dict[str, Any]:
    """Placement, predicted and measured memory per device, streamed bytes, and the engine's numbers.

    ``parts=false`` leaves the plan itself out, for those who ask every second.
    """
    state = state_of(http)
    return {
        "model": state.settings.model_name,
        "plan": json.loads(state.plan.to_json()) if parts and state.plan is not None else None,
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
        "generated_tokens": core.generated,
        "steps": core.steps,
    }
