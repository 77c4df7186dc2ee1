"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from bigmodel.server.state import ServerState, state_of

router = APIRouter()


@router.get("/v1/models")
async def models(http: Request) -> dict[str, Any]:
    """The one model this server has."""
    return {"object": "list", "data": [_entry(state_of(http))]}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> dict[str, Any]:
    """The model ``name``, or 404."""
    state = state_of(http)
    state.check_model(name)
    return _entry(state)


def _entry(state: ServerState) -> dict[str, Any]:
    entry = {"id": state.settings.model_name, "object": "model", "created": state.created, "owned_by": "bigmodel"}
    if state.engine is not None:
        entry["max_model_len"] = state.engine.core.max_length
    return entry
