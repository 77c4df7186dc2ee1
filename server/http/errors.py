"""Error responses: OpenAI's error object for every failure, with its status; Anthropic's under its paths.

status  type                   when
400     invalid_request_error  an invalid value, an unsupported field, too long a prompt (``param`` names it), a text
                               that cannot be tokenised
401     authentication_error   no key, or a wrong one
404     invalid_request_error  no such model, file or batch, no such route
408     invalid_request_error  a body that comes slowly, while others wait for their turn
409     invalid_request_error  a file that a batch needs, a batch that has ended
413     invalid_request_error  body too long, no place for a file
415     invalid_request_error  a compressed body
422     invalid_request_error  a field missing or of the wrong type
429     rate_limit_error       the queue is full, or a client's turn does not come; ``Retry-After`` says when to retry
500     server_error           the engine failed during the request
503     server_error           loading, draining, the engine has stopped, or the process that tokenises is gone
504     timeout_error          the request's deadline passed
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from bigmodel.server.answers.anthropic import error_body
from bigmodel.server.http.json_bounds import JSONBoundsError
from bigmodel.server.text.long_texts import EncodeError, EncoderGoneError

logger = logging.getLogger(__name__)

ANTHROPIC_PATHS = ("/v1/messages",)
"""Beginnings of the paths whose errors have Anthropic's form."""

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
_CODES = {404: "unknown_url", 405: "method_not_supported", 408: "body_too_slow", 413: "body_too_long"}


MESSAGE_BYTES = 640
"""Longest message of an error as JSON: what clients send is quoted, and they may send megabytes."""

PARAM_BYTES = 160
"""Longest name of the field at fault, as JSON."""


class APIError(Exception):
    """An error response. ``param`` is the field at fault, ``code`` a machine-readable reason."""

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
        self.message = _shortened(_encodable(message), MESSAGE_BYTES)
        self.param = None if param is None else _shortened(_encodable(param), PARAM_BYTES)
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        """The response of a route, with status, headers and error object."""
        if not path.startswith(ANTHROPIC_PATHS):
            return JSONResponse(self.body, self.status, headers=self.headers)
        named = self.param is None or self.param in self.message
        message = self.message if named else f"{self.param}: {self.message}"
        status = 400 if self.status == 422 else self.status
        return JSONResponse(error_body(status, message), status, headers=self.headers)


def _encodable(text: str) -> str:
    """Escape invalid Unicode, which clients may send and messages quote."""
    return text.encode(errors="backslashreplace").decode()


def _shortened(text: str, most: int) -> str:
    """Return the text, its middle left out if it takes more than `most` bytes as JSON."""
    length = most
    while len(text) > most or len(json.dumps(text, ensure_ascii=False).encode()) > most + 2:
        half = length // 2
        text = f"{text[:half]}…{text[len(text) - half :]}"
        length = length * 3 // 4
    return text


def bad_value(param: str, message: str, *, code: str | None = None) -> APIError:
    """400: the field ``param`` has an invalid value."""
    return APIError(400, message, param=param, code=code)


# --- handlers -----------------------------------------------------------------------------------------


def install(app: FastAPI) -> None:
    """Register handlers: every failure of ``app`` becomes an error object and is counted; no stack trace is sent."""

    async def api_error(request: HTTPRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, APIError)
        return counted(app, error, request.url.path)

    async def validation(request: HTTPRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return counted(app, from_validation(list(error.errors())), request.url.path)

    async def http(request: HTTPRequest, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, RequestValidationError):
            return await validation(request, error.__cause__)
        if isinstance(error.__cause__, APIError):  # raised while the body was read
            return counted(app, error.__cause__, request.url.path)
        if isinstance(error.__cause__, JSONBoundsError):
            too_large = APIError(413, f"the body is too large: {error.__cause__}", code="body_too_long")
            return counted(app, too_large, request.url.path)
        if isinstance(error.__cause__, RecursionError | ValueError):  # raised while the body was parsed as JSON
            return counted(app, unreadable(error.__cause__), request.url.path)
        why = str(error.detail)
        if why == HTTPStatus(error.status_code).phrase:  # no such route, or another method
            why = f"{why}: {request.method} {request.url.path}; /docs lists the routes"
        code = _CODES.get(error.status_code)
        return counted(app, APIError(error.status_code, why, code=code, headers=error.headers), request.url.path)

    async def not_encoded(request: HTTPRequest, error: Exception) -> JSONResponse:
        if isinstance(error, EncoderGoneError):
            later = APIError(503, str(error), code="tokenizer_gone", headers={"Retry-After": "1"})
            return counted(app, later, request.url.path)
        return counted(app, APIError(400, str(error), code="text_not_tokenised"), request.url.path)

    async def unexpected(request: HTTPRequest, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return counted(app, APIError(500, "internal error; the server's log says more"), request.url.path)

    app.add_exception_handler(APIError, api_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(EncodeError, not_encoded)
    app.add_exception_handler(Exception, unexpected)


def counted(app: FastAPI, error: APIError, path: str) -> JSONResponse:
    """The response of ``error`` to a request of ``path``, counted in the metrics of ``app``."""
    app.state.server.metrics.refused(error.status)
    return error.response(path)


# --- invalid bodies -----------------------------------------------------------------------------------

DISAGREES = "disagrees"
"""Type of a validation error about a field that contradicts another one; its context names the ``field``."""

_NO_OBJECT = "the body must be a JSON object, sent with 'Content-Type: application/json'"


def from_validation(errors: list[Any]) -> APIError:
    """One error about the first field at fault, from those of pydantic."""
    # A field with alternative shapes has an error for each: one about its value says more than those about shapes,
    # and of those the deepest is about the nearest shape.
    first = min(errors, key=lambda error: _is_shape_error(error["type"]))
    first = min(
        (error for error in errors if error["loc"][:2] == first["loc"][:2]),
        key=lambda error: (_is_shape_error(error["type"]), -len(_place(error))),
    )
    kind: str = first["type"]
    place = _place(first)
    if kind == "extra_forbidden" and place[-1:] != [first["loc"][-1]]:
        place.append(first["loc"][-1])  # the client's name of an unknown field may be anything
    if kind == DISAGREES:
        place.append(first["ctx"]["field"])
    param = ".".join(map(str, place)) or None
    if kind == "json_invalid":
        at = "".join(f" at character {part}" for part in first["loc"][1:])
        return _no_json(f"{first['ctx']['error']}{at}")
    if kind == "missing" and not first["loc"][1:]:
        return APIError(422, f"there is no body: {_NO_OBJECT}", code="missing_required_parameter")
    if kind == "extra_forbidden":
        return APIError(
            400, f"'{param or ''}' is not supported by this server", param=param, code="unsupported_parameter"
        )
    shapes = [error for error in errors if _is_shape_error(kind) and _place(error) == place]
    why = _or(dict.fromkeys(_why(error) for error in shapes or [first]))
    message = f"'{param}': {why}" if param else why
    if kind == "missing":
        return APIError(422, message, param=param, code="missing_required_parameter")
    if _is_shape_error(kind):
        return APIError(422, message, param=param, code="invalid_type")
    return APIError(400, message, param=param, code="invalid_value")


def _place(error: Any) -> list[Any]:
    """Path of the field in the body: names and indices."""
    return [part for part in error["loc"][1:] if not _is_shape_name(part)]


def _why(error: Any) -> str:
    if error["type"].startswith("model_"):
        return "must be an object" if error["loc"][1:] else _NO_OBJECT
    return str(error["msg"]).removeprefix("Value error, ").replace("Input should be ", "must be ")


def _or(reasons: Iterable[str]) -> str:
    """Join ``must be this`` and ``must be that`` in one sentence."""
    first, *others = reasons
    return " or ".join([first, *(other.removeprefix("must be ") for other in others)])


def _no_json(why: str) -> APIError:
    return APIError(400, f"the body is no valid JSON: {why}", code="invalid_json")


def _is_shape_error(kind: str) -> bool:
    return kind.endswith(("_type", "_parsing")) or kind.startswith(("union_tag", "model_"))


def _is_shape_name(part: Any) -> bool:
    """Whether a part of an error's path names an alternative shape, not a field."""
    return isinstance(part, str) and (not part.isidentifier() or part in ("str", "int", "float", "bool", "list"))


def unreadable(error: RecursionError | ValueError) -> APIError:
    """The error of a body that could not be parsed as JSON for a reason other than syntax."""
    if isinstance(error, RecursionError):
        return _no_json("it is nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return _no_json(f"byte {error.start} is not UTF-8")
    return _no_json("a number in it has too many digits")
