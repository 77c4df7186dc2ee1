"""Random requests, drawn from the OpenAPI document by schemathesis."""

from __future__ import annotations

from typing import Any

_OF_A_REQUEST = ("method", "url", "headers", "params", "json", "data", "cookies")


def drawn_requests(port: int, count: int) -> list[bytes]:
    """Return requests that schemathesis draws from the OpenAPI document, as bytes; none if it is not installed."""
    try:
        import schemathesis
    except ImportError:
        return []
    from hypothesis import HealthCheck, Phase, given, settings
    from requests import Request

    url = f"http://127.0.0.1:{port}"
    drawn: list[bytes] = []
    operations: Any = schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()
    for operation in operations:

        @given(case=operation.ok().as_strategy())
        @settings(
            max_examples=max(1, count // 10),
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def draw(case: Any) -> None:
            arguments = {k: v for k, v in case.as_transport_kwargs(base_url=url).items() if k in _OF_A_REQUEST}
            drawn.append(_wire(Request(**arguments).prepare()))

        draw()
    return drawn


def _wire(request: Any) -> bytes:
    """A prepared request in HTTP/1.1."""
    body = request.body or b""
    body = body.encode() if isinstance(body, str) else body
    headers = {**request.headers, "Host": "x", "Connection": "close", "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{request.method} {request.path_url} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
