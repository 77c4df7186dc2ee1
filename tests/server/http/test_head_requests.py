"""HEAD: as GET, without the body."""

from __future__ import annotations

import httpx
import pytest

from bigmodel.server import Loaded, Loading, create_app


def never(progress: Loading) -> Loaded:
    raise AssertionError("an application that is not started loads nothing")


@pytest.mark.anyio
async def test_head_is_answered_wherever_get_is() -> None:
    app = create_app(loader=never)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        found = {path: (await client.head(path)).status_code for path in ("/", "/health", "/ready", "/v1/models")}
        assert found == {"/": 200, "/health": 200, "/ready": 503, "/v1/models": 200}
        assert (await client.head("/v1/completions")).headers["allow"] == "POST"
        assert (await client.head("/nowhere")).status_code == 404


def test_the_answer_has_the_headers_of_get_and_no_body(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        head, get = (client.request(method, "/health", headers={"x-request-id": "one"}) for method in ("HEAD", "GET"))
    assert (head.content, head.headers["content-length"]) == (b"", str(len(get.content)))
    assert head.headers["x-request-id"] == get.headers["x-request-id"] == "one"
