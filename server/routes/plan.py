"""GET /plan: what lives where, what was predicted, what is used, and what the engine is doing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from bigmodel.server.merged_view import merge_views
from bigmodel.server.state import state_of
from bigmodel.server.view import view

router = APIRouter()


@router.get("/plan")
def plan(http: Request, parts: bool = True) -> dict[str, Any]:
    """Placement, predicted and measured memory per device, streamed bytes, and the engine's numbers.

    With several replicas these are of all of them together, and ``replicas`` has those of each; ``plan`` is the
    answering one's. ``parts=false`` leaves the plans themselves out, for those who ask every second.
    """
    state = state_of(http)
    replicas = [] if state.fleet is None else state.fleet.views()
    shown = {"model": state.settings.model_name, **view(state)}
    if replicas:
        shown |= merge_views(replicas)
    shown["replicas"] = replicas
    if not parts:
        for each in (shown, *replicas):
            each["plan"] = None
    return shown
