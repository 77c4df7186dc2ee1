"""Every failure of the application becomes an error object, is counted, and shows no stack trace."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from bigmodel.server.body_errors import from_validation, unreadable
from bigmodel.server.errors import APIError

logger = logging.getLogger(__name__)

_CODES = {404: "unknown_url", 405: "method_not_supported", 413: "body_too_long"}


def install(app: FastAPI) -> None:
    """Answer every failure of ``app`` with an error object."""

    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, APIError)
        return counted(app, error)

    async def validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return counted(app, from_validation(list(error.errors())))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, RecursionError | ValueError):  # what reading the body as JSON ran into
            return counted(app, unreadable(error.__cause__))
        why = str(error.detail)
        if why == HTTPStatus(error.status_code).phrase:  # no such route, or not for this method
            why = f"{why}: {request.method} {request.url.path}; /docs lists what there is"
        code = _CODES.get(error.status_code)
        return counted(app, APIError(error.status_code, why, code=code, headers=error.headers))

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
