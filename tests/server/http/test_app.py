"""Loading in the background: alive at once, ready when the model is there, and honest when it never will be."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import httpx
import pytest

from bigmodel.server import Engine, EngineOptions, Loaded, Loading, Settings, create_app
from tests.server.live import serving
from tests.server.tiny import tiny_model, tiny_tokenizer


@pytest.mark.slow
def test_while_loading_it_is_alive_but_not_ready() -> None:
    go = threading.Event()

    def loader(progress: Loading) -> Loaded:
        progress.stage, progress.fraction = "loading the weights", 0.25
        go.wait(30)
        return Loaded(tiny_model(), tiny_tokenizer())

    with serving(create_app(loader=loader, settings=Settings("tiny"))) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        waiting = httpx.get(f"{url}/ready")
        assert waiting.status_code == 503
        assert waiting.json() == {"status": "loading", "stage": "loading the weights", "progress": 0.25}
        early = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "loading"
        assert int(early.headers["retry-after"]) > 0
        assert httpx.get(f"{url}/plan").json()["engine"] is None
        go.set()
        until_status(url, 200)
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


@pytest.mark.slow
def test_a_draft_model_changes_no_token() -> None:
    def text_and_guesses(draft: Any) -> tuple[str, float]:
        settings = Settings("tiny", engine=EngineOptions(kv_bytes=64 << 20))
        app = create_app(loader=lambda _: Loaded(tiny_model(), tiny_tokenizer(), None, draft), settings=settings)
        with serving(app) as url:
            until_status(url, 200)
            body = {"model": "tiny", "prompt": "the cat", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
            line = re.search(r"^bigmodel_draft_accepted_tokens_total (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
            assert line is not None
            return answer["choices"][0]["text"], float(line[1])

    plain, nothing = text_and_guesses(None)
    guessed, accepted = text_and_guesses(tiny_model())
    assert guessed == plain
    assert nothing == 0
    assert accepted >= 10  # its own twin guesses right, but for ties


@pytest.mark.slow
def test_a_loader_that_fails_is_reported() -> None:
    failures: list[BaseException] = []

    def loader(progress: Loading) -> Loaded:
        raise OSError("the disk is gone")

    app = create_app(loader=loader, settings=Settings("tiny"), on_failure=failures.append)
    with serving(app) as url:
        while httpx.get(f"{url}/health").status_code == 200:
            time.sleep(0.01)
        assert httpx.get(f"{url}/ready").json() == {"status": "failed"}
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.status_code == 503
        assert "disk" not in answer.text
    assert [str(error) for error in failures] == ["the disk is gone"]


@pytest.mark.slow
def test_the_engine_is_visible_once_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    start = Engine.start

    def watched(engine: Engine) -> None:
        seen.append(app.state.server.first.running)
        start(engine)

    monkeypatch.setattr(Engine, "start", watched)
    app = create_app(loader=lambda _: Loaded(tiny_model(), tiny_tokenizer()), settings=Settings("tiny"))
    with serving(app) as url:
        until_status(url, 200)
    assert seen == [None]


def test_a_model_and_a_loader_are_exclusive() -> None:
    with pytest.raises(ValueError, match="either"):
        create_app()


@pytest.mark.slow
def test_the_application_can_be_described() -> None:
    app = create_app(tiny_model(), tiny_tokenizer(), model_name="tiny")
    paths = app.openapi()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"} <= set(paths)
    assert {"/health", "/ready", "/metrics", "/plan"} <= set(paths)


def never_called(progress: Loading) -> Loaded:
    raise AssertionError("an application that is not started loads nothing")


@pytest.mark.anyio
async def test_head_is_answered_wherever_get_is() -> None:
    app = create_app(loader=never_called)
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


def until_status(url: str, status: int) -> None:
    end = time.monotonic() + 60
    while httpx.get(f"{url}/ready").status_code != status:
        assert time.monotonic() < end
        time.sleep(0.02)
