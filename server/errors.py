"""What a client is told when something is wrong: OpenAI's error object, and the status that goes with it.

status  type                   when
400     invalid_request_error  a value that cannot be, or a field that is not supported (``param`` names it)
401     authentication_error   no key, or a wrong one
404     invalid_request_error  no such model, no such route
413     invalid_request_error  a body or a prompt longer than the server takes
422     invalid_request_error  a field missing or of the wrong type
429     rate_limit_error       the queue is full; ``Retry-After`` says when to come back
500     server_error           the engine failed while the request was at work
503     server_error           loading, draining, or the engine is gone
504     timeout_error          the request's deadline passed
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

DISAGREES = "disagrees"
"""The kind of a validation error about a field that does not go with another one; its context names the ``field``."""

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}


class APIError(Exception):
    """An answer other than the one asked for. ``param`` is the field at fault, ``code`` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _encodable(message)
        self.param = None if param is None else _encodable(param)
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def _encodable(text: str) -> str:
    """What a client sent may be quoted back to it, also where it is no valid Unicode."""
    return text.encode(errors="backslashreplace").decode()


def bad_value(param: str, message: str, *, code: str | None = None) -> APIError:
    """400: the field ``param`` has a value that cannot be."""
    return APIError(400, message, param=param, code=code)


def from_validation(errors: list[Any]) -> APIError:
    """What pydantic found, as one error about the first field at fault."""
    # Where a field may have one of several shapes there is an error for each: one about the value says more
    # than those about shapes it was not meant to have.
    first = min(errors, key=lambda error: _is_shape_error(error["type"]))
    kind: str = first["type"]
    place = [part for part in first["loc"][1:] if not _is_shape_name(part)]
    if kind == "extra_forbidden" and place[-1:] != [first["loc"][-1]]:
        place.append(first["loc"][-1])  # the client's own name for a field may be anything
    if kind == DISAGREES:
        place.append(first["ctx"]["field"])
    param = ".".join(map(str, place)) or None
    if kind == "json_invalid":
        return APIError(400, f"the body is no valid JSON: {first['ctx']['error']}", code="invalid_json")
    if kind == "extra_forbidden":
        return APIError(
            400, f"'{param or ''}' is not supported by this server", param=param, code="unsupported_parameter"
        )
    why = str(first["msg"]).removeprefix("Value error, ")
    message = f"'{param}': {why}" if param else why
    if kind == "missing":
        return APIError(422, message, param=param, code="missing_required_parameter")
    if _is_shape_error(kind):
        return APIError(422, message, param=param, code="invalid_type")
    return APIError(400, message, param=param, code="invalid_value")


def _is_shape_error(kind: str) -> bool:
    return kind.endswith(("_type", "_parsing")) or kind.startswith(("union_tag", "model_"))


def _is_shape_name(part: Any) -> bool:
    """Whether a part of an error's place names an alternative shape, not a field."""
    return isinstance(part, str) and (not part.isidentifier() or part in ("str", "int", "float", "bool", "list"))


def install(app: FastAPI) -> None:
    """Answer every failure with an error object; never with a stack trace."""

    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, APIError)
        return counted(app, error)

    async def validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return counted(app, from_validation(list(error.errors())))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        why = str(error.detail)
        if why == HTTPStatus(error.status_code).phrase:  # no such route, or not for this method
            why = f"{why}: {request.method} {request.url.path}; /docs lists what there is"
        return counted(app, APIError(error.status_code, why, headers=error.headers))

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return counted(app, APIError(500, "internal error; the server's log says more"))

    app.add_exception_handler(APIError, api_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


def counted(app: FastAPI, error: APIError) -> JSONResponse:
    """The answer that ``error`` is, counted among the refusals of ``app``."""
    app.state.server.metrics.refused(error.status)
    return error.response()
