"""Batches of clients: begun, listed, cancelled; nobody else's; they leave others their places and limits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bigmodel.server.http.keys import ApiKey
from tests.server.batches.making import answers, line, lines
from tests.server.live import MODEL, engine_of, serving, tiny_app
from tests.server.test_limits import gated_app

ALICE, BOB = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def app() -> Any:
    return tiny_app(api_keys=("alice", "bob"))


@pytest.fixture(scope="module")
def client(app: Any) -> Iterator[httpx.Client]:
    with serving(app) as url, httpx.Client(base_url=f"{url}/v1", headers=ALICE, timeout=60) as client:
        yield client


def request(name: str, **fields: Any) -> bytes:
    """A completion of a batch."""
    body = {"model": MODEL, "prompt": "the cat", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    return line(name, body=body)


def upload(client: httpx.Client, *requests: bytes) -> str:
    form = {"data": {"purpose": "batch"}, "files": {"file": ("x.jsonl", lines(*requests))}}
    file_id: str = client.post("/files", **form).json()["id"]  # type: ignore[arg-type]
    return file_id


def begin(client: httpx.Client, file_id: str, **fields: Any) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h", **fields}
    return client.post("/batches", json=body)


def ended(client: httpx.Client, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch at its end."""
    while True:
        found: dict[str, Any] = client.get(f"/batches/{batch['id']}").json()
        if found["status"] in ("completed", "failed", "cancelled", "expired"):
            return found
        time.sleep(0.01)


def content(client: httpx.Client, file_id: str) -> dict[str, dict[str, Any]]:
    return answers(client.get(f"/files/{file_id}/content").content)


@pytest.mark.slow
def test_a_batch_has_the_answers_that_its_requests_have(client: httpx.Client) -> None:
    asked = {"a": {}, "b": {"prompt": "the mat"}, "bad": {"temperature": 9}, "streamed": {"stream": True}}
    batch = begin(client, upload(client, *(request(name, **fields) for name, fields in asked.items()))).json()
    assert (batch["object"], batch["endpoint"], batch["completion_window"]) == ("batch", PATH, "24h")
    assert (batch["status"], batch["errors"], batch["output_file_id"]) == ("validating", None, None)
    batch = ended(client, batch)
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 4, "completed": 2, "failed": 2})
    output = content(client, batch["output_file_id"])
    for name in ("a", "b"):
        body = {**json.loads(request(name, **asked[name]))["body"]}
        alone = client.post("/completions", json=body).json()
        found = output[name]["response"]
        assert (found["status_code"], found["request_id"][:4]) == (200, "req_")
        assert found["body"]["choices"] == alone["choices"]
    error = content(client, batch["error_file_id"])
    params = {name: each["response"]["body"]["error"]["param"] for name, each in error.items()}
    assert params == {"bad": "temperature", "streamed": "stream"}
    assert {each["response"]["status_code"] for each in error.values()} == {400}


def test_a_wrong_input_fails_with_the_numbers_of_its_lines(client: httpx.Client) -> None:
    batch = ended(client, begin(client, upload(client, request("a"), b"{", request("a"))).json())
    assert batch["status"] == "failed"
    found = [(each["code"], each["line"]) for each in batch["errors"]["data"]]
    assert found == [("invalid_json_line", 2), ("duplicate_custom_id", 3)]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
        ({"input_file_id": None}, 422, "input_file_id"),
        ({"input_file_id": "../x"}, 404, "input_file_id"),
        ({"other": 1}, 400, "other"),
    ],
)
def test_a_body_that_asks_for_something_else_is_refused_by_name(
    client: httpx.Client, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = begin(client, "file-none", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.slow
def test_another_key_has_404_for_it_and_its_files(client: httpx.Client) -> None:
    file = upload(client, request("a"))
    batch = ended(client, begin(client, file).json())
    for method, path in (("GET", ""), ("POST", "/cancel")):
        answer = client.request(method, f"/batches/{batch['id']}{path}", headers=BOB)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batch_not_found")
    assert client.get("/batches", headers=BOB).json()["data"] == []
    for name in (file, batch["output_file_id"]):
        assert client.get(f"/files/{name}/content", headers=BOB).status_code == 404
    body = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
    assert client.post("/batches", json=body, headers=BOB).status_code == 404
    assert begin(client, batch["output_file_id"]).status_code == 404  # it is no input
    assert client.post(f"/batches/{batch['id']}/cancel").json()["error"]["code"] == "batch_ended"


@pytest.mark.slow
def test_batches_are_listed_the_newest_first(client: httpx.Client) -> None:
    made = [begin(client, upload(client, request("a")), metadata={"n": str(n)}).json()["id"] for n in range(3)]
    shown = client.get("/batches", params={"limit": 2}).json()
    assert ([each["id"] for each in shown["data"]], shown["has_more"]) == (made[:0:-1], True)
    assert [each["metadata"] for each in shown["data"]] == [{"n": "2"}, {"n": "1"}]
    after = client.get("/batches", params={"after": made[1], "limit": 1}).json()
    assert after["data"][0]["id"] == made[0]
    assert client.get("/batches", params={"limit": 101}).status_code == 400


@pytest.mark.slow
def test_clients_find_places_beside_a_batch_and_cancelling_gives_its_own_back() -> None:
    app, gate = gated_app(max_sequences=4)
    with serving(app) as url, httpx.Client(base_url=f"{url}/v1", timeout=60) as client:
        file = upload(client, *(request(f"{number}", max_tokens=900) for number in range(20)))
        batch = begin(client, file).json()
        engine = engine_of(app)
        while engine.unfinished < 2:
            gate.allowed.release()
            time.sleep(0.005)
        time.sleep(0.1)
        assert engine.unfinished == 2  # half of the places
        assert client.delete(f"/files/{file}").json()["error"]["code"] == "file_in_use"
        gate.allowed.release(100)
        done = client.post("/completions", json={"model": MODEL, "prompt": "the", "max_tokens": 2})
        assert done.status_code == 200
        assert client.post(f"/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
        gate.allowed.release(1000)
        found = ended(client, batch)
        counts = {"total": 20, "completed": 0, "failed": 20}
        assert (found["status"], found["request_counts"]) == ("cancelled", counts)
        while engine.unfinished:
            time.sleep(0.005)


@pytest.mark.slow
def test_a_batch_leaves_half_of_its_keys_minute_to_other_requests() -> None:
    app = tiny_app(api_keys=(ApiKey.of("alice", "alice", requests=8),))
    with serving(app) as url, httpx.Client(base_url=f"{url}/v1", headers=ALICE, timeout=60) as client:
        file = upload(client, *(request(f"{number}") for number in range(6)))
        batch = begin(client, file).json()
        while client.get(f"/batches/{batch['id']}").json()["request_counts"]["completed"] < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        found = client.get(f"/batches/{batch['id']}").json()
        assert (found["status"], found["request_counts"]["failed"]) == ("in_progress", 0)
        asked = {"model": MODEL, "prompt": "the", "max_tokens": 2}
        assert [client.post("/completions", json=asked).status_code for _ in range(5)] == [200, 200, 200, 200, 429]
