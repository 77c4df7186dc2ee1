"""/v1/batches: files of requests that are answered beside what clients wait for."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi import Request as HTTPRequest

from bigmodel.server.batches.records import Batch
from bigmodel.server.http.batch_bodies import BatchBody
from bigmodel.server.http.parsing import JSONRoute
from bigmodel.server.http.state import state_of
from bigmodel.server.http.stored import batches_for, missing, owner_of, page, refusals

router = APIRouter()
bodies = APIRouter(route_class=JSONRoute)

MOST_LISTED = 100


@bodies.post("/v1/batches")
async def create(body: BatchBody, http: HTTPRequest) -> dict[str, Any]:
    """Begin a batch of the requests in a file."""
    state_of(http).refuse_if_closed()
    batches, owner = batches_for(http), owner_of(http)
    given = batches.files.get(owner, body.input_file_id)
    if given is None or given.purpose != "batch":
        raise missing("file", body.input_file_id, "input_file_id")
    expiry = body.output_expires_after
    seconds = None if expiry is None else expiry.seconds
    with refusals():
        batch = Batch.new(owner, body.endpoint, body.input_file_id, body.metadata, seconds)
        return (await batches.create(batch)).view()


router.include_router(bodies)


@router.get("/v1/batches")
async def batches(
    http: HTTPRequest, after: str | None = None, limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 20
) -> dict[str, Any]:
    """The batches of the key, the newest first."""
    return page(batches_for(http).of(owner_of(http))[::-1], after, limit)


@router.get("/v1/batches/{batch_id}")
async def batch(batch_id: str, http: HTTPRequest) -> dict[str, Any]:
    """The batch of this id, or 404."""
    return _found(http, batch_id).view()


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(batch_id: str, http: HTTPRequest) -> dict[str, Any]:
    """End a batch before its time: what is answered stays; 409 where it has ended."""
    with refusals():
        return (await batches_for(http).cancel(_found(http, batch_id))).view()


def _found(http: HTTPRequest, batch_id: str) -> Batch:
    found = batches_for(http).get(owner_of(http), batch_id)
    if found is None:
        raise missing("batch", batch_id, "batch_id")
    return found
