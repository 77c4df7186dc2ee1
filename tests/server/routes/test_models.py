"""The one model that a server has is listed, and found by its name alone."""

from __future__ import annotations

import httpx
import pytest

from bigmodel.server import Loaded, Loading, Settings, create_app
from tests.server.live import MODEL


def test_the_model_is_listed_and_found(url: str) -> None:
    listed = httpx.get(f"{url}/v1/models").json()
    assert listed["object"] == "list"
    (entry,) = listed["data"]
    assert entry == httpx.get(f"{url}/v1/models/{MODEL}").json()
    assert (entry["id"], entry["object"], entry["owned_by"]) == (MODEL, "model", "bigmodel")
    assert entry["max_model_len"] == 1024


@pytest.mark.parametrize("name", ["other", "other/one"])
def test_any_other_name_is_404(url: str, name: str) -> None:
    answer = httpx.get(f"{url}/v1/models/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert f"'{name}'" in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_while_the_model_loads_its_name_is_known_and_its_length_is_not() -> None:
    def never(progress: Loading) -> Loaded:
        raise AssertionError("an application that is not started loads nothing")

    app = create_app(loader=never, settings=Settings("owner/name"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        entry = (await client.get("/v1/models/owner/name")).json()
    assert entry["id"] == "owner/name"
    assert "max_model_len" not in entry
