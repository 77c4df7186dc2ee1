"""GET /health: is the process alive; GET /ready: may requests be sent."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from bigmodel.server.state import state_of

router = APIRouter()


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(http: Request) -> JSONResponse:
    """200 while the process can do its work, loading included; 503 once the engine has failed."""
    state = state_of(http)
    broken = state.failure is not None or (state.engine is not None and not state.engine.healthy)
    return JSONResponse({"status": "failed" if broken else "ok"}, 503 if broken else 200)


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(http: Request) -> JSONResponse:
    """200 when requests are taken; 503 while loading (with progress), draining, or failed."""
    state = state_of(http)
    if state.failure is not None or (state.engine is not None and not state.engine.healthy):
        return JSONResponse({"status": "failed"}, 503)
    if state.draining:
        return JSONResponse({"status": "draining"}, 503)
    if state.engine is None:
        loading = {"status": "loading", "stage": state.loading.stage, "progress": state.loading.fraction}
        return JSONResponse(loading, 503, headers={"Retry-After": "2"})
    return JSONResponse({"status": "ready"})
