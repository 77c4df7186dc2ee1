"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from bigmodel.server.state import state_of

router = APIRouter()


@router.get("/metrics")
def metrics(http: Request) -> Response:
    """Everything counted, in Prometheus' text format; by all replicas, where there are several."""
    state = state_of(http)
    text = state.metrics.render() if state.fleet is None else state.fleet.metrics()
    return Response(text, media_type=CONTENT_TYPE_LATEST)
