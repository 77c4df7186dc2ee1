"""/v1/files: the inputs of batches, and their answers."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import anyio.to_thread
from fastapi import APIRouter, Query
from fastapi import Request as HTTPRequest
from pydantic import ValidationError
from starlette.responses import FileResponse, Response

from bigmodel.server.batches.records import StoredFile
from bigmodel.server.http.batch_bodies import ExpiresAfter
from bigmodel.server.http.errors import APIError, bad_value, from_validation
from bigmodel.server.http.state import state_of
from bigmodel.server.http.stored import batches_for, missing, owner_of, page, refusals
from bigmodel.server.http.uploads import Form, read_form, unknown_field

router = APIRouter()

MOST_LISTED = 10_000

_FORM = {
    "type": "object",
    "title": "form",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
}


@router.post(
    "/v1/files",
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def upload(http: HTTPRequest) -> dict[str, Any]:
    """Keep a file: ``file`` and ``purpose="batch"`` of a form."""
    state_of(http).refuse_if_closed()
    batches = batches_for(http)
    with refusals():
        pending = await anyio.to_thread.run_sync(batches.files.begin, owner_of(http), batches.limits.file_bytes)
        try:
            form = await read_form(http, "file", pending)
            seconds = _checked(form)
            published = partial(pending.publish, form.filename or "", "batch", seconds)
            return (await anyio.to_thread.run_sync(published)).view()
        except BaseException:
            pending.discard()
            raise


def _checked(form: Form) -> int | None:
    """The seconds after which a file expires; 400 for a form that does not ask for what there is."""
    fields = dict(form.fields)
    purpose = fields.pop("purpose", None)
    expiry = {name: fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds")}
    if fields:
        raise unknown_field(next(iter(fields)))
    if form.filename is None:
        raise APIError(422, "'file': Field required", param="file", code="missing_required_parameter")
    if purpose is None:
        raise APIError(422, "'purpose': Field required", param="purpose", code="missing_required_parameter")
    if purpose != "batch":
        raise bad_value("purpose", "must be 'batch': this server keeps files for nothing else")
    if not any(expiry.values()):
        return None
    seconds = expiry["seconds"] or ""
    try:
        given = {"anchor": expiry["anchor"], "seconds": int(seconds) if seconds.isdecimal() else seconds}
        return ExpiresAfter.model_validate(given).seconds
    except ValidationError as error:
        raise from_validation(
            [{**each, "loc": ("body", "expires_after", *each["loc"])} for each in error.errors()]
        ) from error


@router.get("/v1/files")
async def files(
    http: HTTPRequest,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = MOST_LISTED,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> dict[str, Any]:
    """The files of the key, the newest first unless ``order`` is "asc"."""
    found = [file for file in batches_for(http).files.of(owner_of(http)) if purpose in (None, file.purpose)]
    return page(found if order == "asc" else found[::-1], after, limit)


@router.get("/v1/files/{file_id}")
async def file(file_id: str, http: HTTPRequest) -> dict[str, Any]:
    """The file of this id, or 404."""
    return _found(http, file_id).view()


@router.get("/v1/files/{file_id}/content")
async def content(file_id: str, http: HTTPRequest) -> Response:
    """The bytes of a file."""
    found = _found(http, file_id)
    headers = {"X-Content-Type-Options": "nosniff"}
    path = batches_for(http).files.path(found.id)
    return FileResponse(path, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}")
async def delete(file_id: str, http: HTTPRequest) -> dict[str, Any]:
    """Delete a file; 409 while a batch needs it."""
    found = _found(http, file_id)
    with refusals():
        await anyio.to_thread.run_sync(batches_for(http).files.delete, found)
    return {"id": found.id, "object": "file", "deleted": True}


def _found(http: HTTPRequest, file_id: str) -> StoredFile:
    found = batches_for(http).files.get(owner_of(http), file_id)
    if found is None:
        raise missing("file", file_id, "file_id")
    return found
