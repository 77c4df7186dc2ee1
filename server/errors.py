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

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

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
