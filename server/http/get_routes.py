"""GET routes: /health, /ready, /v1/models, /plan, /metrics, and the page on /."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime, timezone
from functools import lru_cache
from importlib import resources
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HTTPRequest
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from bigmodel.server.http.state import ServerState, state_of

router = APIRouter()


@router.get("/v1/models")
async def models(http: HTTPRequest) -> dict[str, Any]:
    """The models of this server, with the fields of OpenAI's list and of Anthropic's."""
    state = state_of(http)
    entries = [_model_entry(state, name) for name in (*state.models, *state.adapters)]
    ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
    return {"object": "list", "data": entries, "has_more": False, **ends}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: HTTPRequest) -> dict[str, Any]:
    """The model ``name``, or 404."""
    state = state_of(http)
    state.check_model(name)
    return _model_entry(state, name)


def _model_entry(state: ServerState, name: str) -> dict[str, Any]:
    """An entry of the list; that of an adapter names its base model as `parent`."""
    served = state.models.get(name) or state.adapters[name]
    entry: dict[str, Any] = {"id": name, "object": "model", "created": state.created, "owned_by": "bigmodel"}
    created = datetime.fromtimestamp(state.created, timezone.utc).isoformat()
    entry |= {"type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}
    if served.longest:
        entry["max_model_len"] = served.longest
    if name not in state.models:
        entry["parent"] = served.name
    return entry


@router.get("/health")
async def health(http: HTTPRequest) -> JSONResponse:
    """200 while the process works, loading included; 503 once loading or the engine has failed."""
    failed = state_of(http).failed
    return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)


@router.get("/ready")
async def ready(http: HTTPRequest) -> JSONResponse:
    """200 when requests are accepted; 503 while loading (with progress), draining, or failed.

    Of several models it is the first that is loaded at the start.
    """
    state = state_of(http)
    if state.failed:
        return JSONResponse({"status": "failed"}, 503)
    if state.draining:
        return JSONResponse({"status": "draining"}, 503)
    if state.loading:
        progress = state.first.loading
        loading = {"status": "loading", "stage": progress.stage, "progress": progress.fraction}
        return JSONResponse(loading, 503, headers={"Retry-After": "2"})
    return JSONResponse({"status": "ready"})


@router.get("/plan")
def plan(http: HTTPRequest, parts: bool = True, model: str | None = None) -> dict[str, Any]:
    """Placement, predicted and measured memory per device, streamed bytes, and the engine's numbers.

    With several replicas these are totals, and ``replicas`` lists each; ``plan`` is that of the replica that answers.
    With several models they are those of ``model``, else of the first, and ``models`` lists all of them.
    ``parts=false`` leaves out the plans themselves, for clients that poll.
    """
    state = state_of(http)
    state.check_model(model)
    assert state.reporter is not None
    shown = state.reporter.plan(model)
    if not parts:
        for each in (shown, *shown["replicas"]):
            each["plan"] = None
    return shown


@router.get("/metrics")
def metrics(http: HTTPRequest) -> Response:
    """All metrics in the text format of Prometheus; totals, where there are several replicas."""
    reporter = state_of(http).reporter
    assert reporter is not None
    return Response(reporter.metrics(), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """The page: devices, live numbers and a chat box, in one file that loads nothing else."""
    text, policy = _page()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


@lru_cache(maxsize=1)
def _page() -> tuple[str, str]:
    """The page, and a content security policy that allows its own script and nothing else."""
    text = resources.files("bigmodel.server").joinpath("page.html").read_text(encoding="utf-8")
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy
