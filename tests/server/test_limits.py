"""What the server refuses, with which status, and that nothing is held afterwards."""

from __future__ import annotations

import gc
import gzip
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.server.live import MODEL, engine_of, serving, tiny_app
from tests.server.serve_tiny import Gated, SlowOrBroken
from tests.server.tiny import tiny_model

JSON = {"content-type": "application/json"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "the cat", "max_tokens": 4, "ignore_eos": True, **fields}


def post(url: str, path: str = "/v1/completions", **kwargs: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", timeout=60, **kwargs)


def slow_model(delay: float) -> Any:
    model = tiny_model()
    model.model.embed_tokens = SlowOrBroken(model.model.embed_tokens, delay)
    return model


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "1"}, 422, "temperature"),
        ({"top_p": -0.1}, 400, "top_p"),
        ({"min_p": 1.5}, 400, "min_p"),
        ({"n": 0}, 400, "n"),
        ({"n": True}, 422, "n"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 5000}, 400, "max_tokens"),
        ({"stop": [""]}, 400, "stop"),
        ({"logit_bias": {"cat": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"1": 101}}, 400, "logit_bias"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [100000]}, 400, "prompt"),
        ({"prompt": 7}, 422, "prompt"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"prompt": "x" * 3000}, 400, "prompt"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"suffix": "end"}, 400, "suffix"),
        ({"best_of": 3}, 400, "best_of"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"timeout": 0}, 400, "timeout"),
    ],
)
def test_a_bad_value_is_named(url: str, fields: dict[str, Any], status: int, param: str | None) -> None:
    answer = post(url, content=json.dumps(body(**fields)), headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, str(error["param"] or "").split(".")[0] or None) == (status, param), error
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_a_missing_field_is_named(url: str) -> None:
    answer = post(url, json={"prompt": "x"})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"model": NaN}', "\x00"])
def test_a_body_that_is_not_a_json_object_is_refused(url: str, text: str) -> None:
    answer = post(url, content=text, headers=JSON)
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_routes_and_methods_are_errors_of_the_same_shape(url: str) -> None:
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    answer = httpx.get(f"{url}/v1/completions")
    assert answer.status_code == 405
    assert "error" in answer.json()


@pytest.mark.slow
def test_the_api_needs_a_key_and_health_needs_none() -> None:
    with serving(tiny_app(api_keys=("alpha", "beta"))) as url:
        for headers in ({}, {"Authorization": "Bearer gamma"}, {"Authorization": "Basic alpha"}):
            answer = httpx.get(f"{url}/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json()["error"]["type"] == "authentication_error"
        for key in ("alpha", "beta"):
            assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 401
        counted = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer beta"}).text
        assert 'bigmodel_requests_total{outcome="refused_401"} 4.0' in counted


@pytest.mark.slow
def test_a_body_that_is_too_long_is_refused_with_and_without_a_length() -> None:
    with serving(tiny_app(max_body_bytes=2000)) as url:
        large = json.dumps(body(prompt="x" * 3000)).encode()
        announced = post(url, content=large, headers=JSON)
        assert announced.status_code == 413
        assert announced.json()["error"]["code"] == "body_too_long"

        def chunks() -> Iterator[bytes]:
            yield from (large[at : at + 500] for at in range(0, len(large), 500))

        unannounced = post(url, content=chunks(), headers=JSON)
        assert (unannounced.status_code, unannounced.json()["error"]["code"]) == (413, "body_too_long")
        assert post(url, json=body()).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/files"])
def test_a_compressed_body_is_refused(url: str, path: str) -> None:
    packed = gzip.compress(json.dumps(body()).encode())
    answer = httpx.post(f"{url}{path}", content=packed, headers={**JSON, "Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert "send this one without 'Content-Encoding: gzip'" in answer.json()["error"]["message"]


def gated_app(**engine: Any) -> tuple[Any, Gated]:
    """The application, and what lets its forwards through."""
    model = tiny_model()
    app = tiny_app(model, engine=engine)
    gate = model.model.embed_tokens = Gated(model.model.embed_tokens)
    return app, gate


@pytest.mark.slow
def test_a_full_queue_is_429_and_empties_again() -> None:
    app, gate = gated_app(max_sequences=1, max_queue=1)
    with serving(app) as url:
        statuses: list[int] = []
        threads = [threading.Thread(target=lambda: statuses.append(post(url, json=body()).status_code)) for _ in "ab"]
        for thread in threads:
            thread.start()
        engine = engine_of(app)
        wait_until(lambda: engine.unfinished == 2)
        refused = post(url, json=body())
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        gate.allowed.release(100)
        for thread in threads:
            thread.join()
        assert statuses == [200, 200]
        assert post(url, json=body()).status_code == 200


@pytest.mark.slow
def test_prompts_that_do_not_all_fit_the_queue_are_all_refused() -> None:
    app, gate = gated_app(max_sequences=2, max_queue=1)
    with serving(app) as url:
        engine = engine_of(app)
        first = threading.Thread(target=lambda: post(url, json=body()))
        first.start()
        wait_until(lambda: engine.unfinished == 1)
        assert post(url, json=body(prompt=["a", "b", "c"])).status_code == 429
        gate.allowed.release(100)
        first.join()
        wait_until(lambda: engine.unfinished == 0)
        assert post(url, json=body(n=3)).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "param"), [({"prompt": ["a", "b"], "n": 2}, "prompt"), ({"n": 4}, "n")])
def test_more_sequences_than_the_queue_ever_holds_are_not_retryable(fields: dict[str, Any], param: str) -> None:
    with serving(tiny_app(engine={"max_sequences": 2, "max_queue": 1})) as url:
        answer = post(url, json=body(**fields))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "at most 3" in answer.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "field"), [("chat/completions", "messages"), ("responses", "input"), ("messages", "")]
)
def test_parts_of_a_body_are_not_held_while_its_request_waits(path: str, field: str) -> None:
    app, gate = gated_app(max_sequences=1)
    said = [{"role": "user", "content": f"not held {path} {number}"} for number in range(3)]
    asked = {"model": MODEL, field or "messages": said, **({} if field else {"max_tokens": 2})}
    with serving(app) as url:
        engine, answers = engine_of(app), queue.SimpleQueue[httpx.Response]()
        waiting = threading.Thread(target=lambda: answers.put(post(url, f"/v1/{path}", json=asked)))
        waiting.start()
        wait_until(lambda: engine.unfinished == 1)
        wait_until(lambda: not held_parts(f"not held {path}"))
        gate.allowed.release(2000)
        waiting.join()
        assert answers.get().status_code == 200


def held_parts(text: str) -> list[BaseModel]:
    """Parts of bodies that say something."""
    found = [each for each in gc.get_objects() if isinstance(each, BaseModel) and "content" in each.__dict__]
    return [part for part in found if text in str(part.__dict__["content"])]


def test_health_answers_head(url: str) -> None:
    assert [httpx.head(f"{url}/{path}").status_code for path in ("health", "ready", "")] == [200, 200, 200]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_frees_slot_and_memory(stream: bool) -> None:
    app = tiny_app(slow_model(0.01))
    with serving(app) as url:
        core = engine_of(app).core
        host, port = url.removeprefix("http://").split(":")
        text = json.dumps(body(max_tokens=900, stream=stream)).encode()
        with socket.create_connection((host, int(port))) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(text)}\r\n\r\n"
            connection.sendall(head.encode() + text)
            wait_until(lambda: core.counts.generated > 3)
        wait_until(lambda: engine_of(app).unfinished == 0)
        assert not core.scheduler.running
        assert core.counts.generated < 900
        assert core.scheduler.pool.used == 0


@pytest.mark.slow
def test_a_deadline_ends_a_request() -> None:
    app = tiny_app(slow_model(0.01))
    with serving(app) as url:
        answer = post(url, json=body(max_tokens=900, timeout=0.2))
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"
        request = body(max_tokens=900, timeout=60, stream=True)
        with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=60) as streamed:
            assert streamed.status_code == 200
            pieces = streamed.iter_text()
            text = next(pieces)
            (running,) = engine_of(app).core.requests.values()
            assert running.deadline is not None
            running.deadline = time.monotonic()  # once the answer has begun, however busy the machine is
            text += "".join(pieces)
        *_, last, end = text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert end == ""
        assert engine_of(app).core.scheduler.pool.used == 0


@pytest.mark.slow
def test_the_servers_own_deadline_applies_by_default() -> None:
    with serving(tiny_app(slow_model(0.01), request_timeout=0.2)) as url:
        assert post(url, json=body(max_tokens=900)).status_code == 504
        assert post(url, json=body(max_tokens=900, timeout=60)).status_code == 504


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)
