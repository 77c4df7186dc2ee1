"""The official client's files and batches work against the server unmodified, and outlive a server that is killed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.examples import alike
from tests.server.http.test_run import Child, process, wait_ready
from tests.server.live import MODEL

CHAT = {"messages": [{"role": "user", "content": "the end?"}], "max_tokens": 4}
BODIES: dict[Any, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "the cat", "max_tokens": 4},
    "/v1/embeddings": {"input": ["the cat", "the mat"]},
    "/v1/responses": {"input": "the cat", "max_output_tokens": 4},
}


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def requests(endpoint: str, number: int, **fields: Any) -> bytes:
    """An input of so many requests."""
    body = {"model": MODEL, **BODIES[endpoint], **fields}
    made = ({"custom_id": f"r{n}", "method": "POST", "url": endpoint, "body": body} for n in range(number))
    return b"".join(json.dumps(each).encode() + b"\n" for each in made)


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled"):
        time.sleep(0.01)
    return batch


@contextmanager
def kept(folder: Path, delay: float = 0.0) -> Iterator[tuple[Child, openai.OpenAI]]:
    """A process that serves with a folder of batches, and a client of it."""
    with process(delay, 60, linger=0.5, folder=str(folder)) as (child, url):
        wait_ready(url)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield child, client


def begun(client: openai.OpenAI, content: bytes) -> str:
    file = client.files.create(file=content, purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def answers(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_from_its_file_to_its_answers(client: openai.OpenAI, endpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(requests(endpoint, 3))
    with path.open("rb") as opened:
        file = client.files.create(file=opened, purpose="batch")
    assert (file.filename, file.bytes) == ("input.jsonl", path.stat().st_size)
    batch = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"run": "1"}
    )
    batch = ended(client, batch.id)
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"run": "1"}, MODEL)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (3, 3)
    assert batch.output_file_id is not None
    found = answers(client, batch.output_file_id)
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(each["response"]["body"]["usage"]["total_tokens"] for each in found)
    assert sorted(answer["custom_id"] for answer in found) == ["r0", "r1", "r2"]
    for answer in found:
        assert answer["response"]["body"]["model"] == MODEL
        assert answer["error"] is None
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert {file.id, batch.output_file_id} <= {each.id for each in client.files.list()}
    assert batch.id in [each.id for each in client.batches.list(limit=100)]
    assert client.files.delete(file.id).deleted


def test_errors_raise_the_exception_classes_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("file-none")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=b"x", purpose="assistants")
    file = client.files.create(file=b"{", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at is not None
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = ended(client, batch.id)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert (batch.status, batch.errors.data[0].line) == ("failed", 1)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


@pytest.mark.slow
@alike("number", [signal.SIGKILL, signal.SIGTERM], first=1)
def test_a_batch_outlives_its_server(number: signal.Signals, tmp_path: Path) -> None:
    content = requests("/v1/completions", 24, ignore_eos=True, temperature=0)
    with kept(tmp_path, delay=0.01) as (child, client):
        batch_id = begun(client, content)
        while (batch := client.batches.retrieve(batch_id)).request_counts.completed < 8:  # type: ignore[union-attr]
            time.sleep(0.005)
        assert batch.status == "in_progress"
        child.send_signal(number)
        child.wait(60)
    written = [path.read_bytes() for path in (tmp_path / "files").glob("*.data")]
    before = next(found for found in written if b"batch_req_" in found)
    with kept(tmp_path) as (_, client):
        batch = ended(client, batch_id)
        assert batch.status == "completed"
        found = answers(client, batch.output_file_id)
    whole = before[: before.rindex(b"\n") + 1].splitlines()
    assert found[: len(whole)] == list(map(json.loads, whole))
    assert sorted(answer["custom_id"] for answer in found) == sorted(f"r{number}" for number in range(24))
    assert len({answer["response"]["body"]["choices"][0]["text"] for answer in found}) == 1


@pytest.mark.slow
def test_a_request_that_an_engine_fails_with_is_not_asked_again(tmp_path: Path) -> None:
    bad = requests("/v1/completions", 1, prompt=[9, 9, 9]).replace(b'"r0"', b'"bad"')
    with kept(tmp_path) as (child, client):
        batch_id = begun(client, bad + requests("/v1/completions", 12, ignore_eos=True))
        assert child.wait(60) == 1
    with kept(tmp_path) as (_, client):
        batch = ended(client, batch_id)
        assert batch.status == "completed"
        failed = {answer["custom_id"]: answer["response"] for answer in answers(client, batch.error_file_id)}
        assert failed["bad"]["status_code"] == 500
        assert {answer["body"]["error"]["code"] for answer in failed.values()} == {"engine_failed"}
        assert len(failed) + len(answers(client, batch.output_file_id)) == 13
