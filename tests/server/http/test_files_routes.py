"""Files of clients: kept, listed, read and deleted; nobody else's, and no more than there is place for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bigmodel.server.batches.limits import BatchLimits
from tests.server.live import serving, tiny_app

ALICE, BOB = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))


@pytest.fixture(scope="module")
def app() -> Any:
    made = tiny_app(api_keys=("alice", "bob"), max_body_bytes=1000)
    made.state.server.batches.limits = BatchLimits(file_bytes=300_000, total_bytes=1_000_000)
    return made


@pytest.fixture(scope="module")
def client(app: Any) -> Iterator[httpx.Client]:
    with serving(app) as url, httpx.Client(base_url=f"{url}/v1", headers=ALICE) as client:
        yield client


def upload(client: httpx.Client, content: bytes = b"x", **fields: str) -> httpx.Response:
    data = {"purpose": "batch", **fields}
    return client.post("/files", data=data, files={"file": ("mine.jsonl", content)})


def test_a_file_is_kept_as_it_is(client: httpx.Client) -> None:
    content = bytes(range(256)) * 1000  # longer than other bodies may be
    answer = upload(client, content)
    assert answer.status_code == 200
    file = answer.json()
    assert (file["bytes"], file["filename"], file["purpose"], file["status"]) == (
        256_000,
        "mine.jsonl",
        "batch",
        "processed",
    )
    assert client.get(f"/files/{file['id']}").json() == file
    read = client.get(f"/files/{file['id']}/content")
    assert (read.content, read.headers["content-type"]) == (content, "application/octet-stream")
    assert client.delete(f"/files/{file['id']}").json() == {"id": file["id"], "object": "file", "deleted": True}
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert client.request(method, f"/files/{file['id']}{path}").status_code == 404


def test_files_are_listed_the_newest_first(client: httpx.Client) -> None:
    made = [upload(client).json()["id"] for _ in range(3)]
    newest = client.get("/files", params={"limit": 2}).json()
    assert ([file["id"] for file in newest["data"]], newest["has_more"]) == (made[:0:-1], True)
    oldest = client.get("/files", params={"order": "asc", "purpose": "batch"}).json()
    assert [file["id"] for file in oldest["data"]] == made
    assert client.get("/files", params={"purpose": "batch_output"}).json()["data"] == []
    assert client.get("/files", params={"after": made[1]}).json()["data"][0]["id"] == made[0]
    assert client.get("/files", params={"limit": 0}).status_code == 400
    for file_id in made:
        client.delete(f"/files/{file_id}")


def test_another_key_has_404_for_it(client: httpx.Client) -> None:
    file = upload(client).json()["id"]
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = client.request(method, f"/files/{file}{path}", headers=BOB)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")
    assert client.get("/files", headers=BOB).json()["data"] == []
    assert client.delete(f"/files/{file}").status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"purpose": "fine-tune"}, 400, "purpose"),
        ({"other": "x"}, 400, "other"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}, 400, "expires_after.seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"}, 422, "expires_after.seconds"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, 400, "expires_after.anchor"),
        ({"expires_after[seconds]": "3600"}, 422, "expires_after.anchor"),
    ],
)
def test_a_form_that_asks_for_something_else_is_refused_by_name(
    client: httpx.Client, fields: dict[str, str], status: int, param: str
) -> None:
    answer = upload(client, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert client.get("/files").json()["data"] == []


def test_a_form_without_its_file_or_purpose_is_refused(client: httpx.Client) -> None:
    for form, param in (
        ({"files": {"file": ("x", b"x")}}, "purpose"),
        ({"data": {"purpose": "batch"}, "files": {"other": ("x", b"x")}}, "other"),
        ({"files": {"purpose": (None, b"batch")}}, "file"),
    ):
        answer = client.post("/files", **form)  # type: ignore[arg-type]
        assert answer.status_code in (400, 422)
        assert answer.json()["error"]["param"] == param


def test_a_file_says_when_it_expires(client: httpx.Client) -> None:
    file = upload(client, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}).json()
    assert file["expires_at"] == file["created_at"] + 3600
    client.delete(f"/files/{file['id']}")


@pytest.mark.parametrize("announced", [True, False])
def test_a_file_that_is_too_long_is_refused_and_leaves_nothing(client: httpx.Client, app: Any, announced: bool) -> None:
    request = client.build_request("POST", "/files", data={"purpose": "batch"}, files={"file": b"x" * 400_000})
    body = request.read()
    headers = {"content-type": request.headers["content-type"]}
    content = body if announced else (body[begin : begin + 9000] for begin in range(0, len(body), 9000))
    answer = client.post("/files", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")
    assert app.state.server.batches.files.total_bytes == 0


def test_files_beyond_the_place_for_them_are_refused(client: httpx.Client) -> None:
    made = [upload(client, b"x" * 300_000) for _ in range(4)]
    assert [answer.status_code for answer in made] == [200, 200, 200, 413]
    assert made[-1].json()["error"]["code"] == "storage_full"
    for answer in made[:3]:
        client.delete(f"/files/{answer.json()['id']}")
    assert upload(client).status_code == 200


@pytest.mark.slow
def test_a_server_that_shuts_down_or_is_a_replica_takes_none() -> None:
    app = tiny_app()
    with serving(app) as url, httpx.Client(base_url=f"{url}/v1") as client:
        app.state.server.draining = True
        answer = upload(client)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    with serving(tiny_app(batches=False)) as url, httpx.Client(base_url=f"{url}/v1") as client:
        for path in ("/files", "/batches", "/batches/batch_1"):
            assert client.get(path).json()["error"]["code"] == "unsupported_endpoint"


@pytest.mark.parametrize(("keys", "share"), [((), 1.0), (("alice",), 1.0), (("alice", "bob"), 0.5)])
def test_one_of_several_keys_leaves_half_of_the_place_to_others(keys: tuple[str, ...], share: float) -> None:
    app = tiny_app(api_keys=keys)
    assert app.state.server.batches.limits.share == share
