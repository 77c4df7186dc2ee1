"""Clients that come, go, cancel and swap models at random moments: each gets its whole answer or one clear error, no
budget is passed, and nothing is held afterwards."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, virtual
from bigmodel.server import EngineOptions
from bigmodel.server.engine.budget import claimed_bytes
from bigmodel.server.http import batch_calls
from bigmodel.server.loading import LoadOptions, PlannedModel
from bigmodel.server.models.served import ServedModel
from tests.plan.brief import plans_are_searched_briefly as plans_are_searched_briefly
from tests.server.adapters.trained import write_adapter
from tests.server.batches.making import line, lines
from tests.server.live import serving
from tests.server.models.several import CONTEXT, SEQUENCES, save, several_app
from tests.server.test_several_models import until, wait_ready
from tests.server.tiny import tiny_model

MODELS, ADAPTERS = ("a", "b"), ("legal", "dry")
NAMES = (*MODELS, *ADAPTERS)
CLIENTS = 4
REFUSALS = frozenset({429, 503, 504})
"""Statuses of a request that could not be answered now."""
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(root / name, seed, layers=2 + seed) for seed, name in enumerate(MODELS)}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """An adapter of each model."""
    root = tmp_path_factory.mktemp("adapters")
    made = zip(MODELS, ADAPTERS, strict=True)
    return {
        model: {name: str(write_adapter(tiny_model(seed, layers=2 + seed), root / name, seed, rank=4))}
        for seed, (model, name) in enumerate(made)
    }


@pytest.fixture
def budgets(folders: dict[str, str], accelerators: None) -> dict[Any, int | str]:
    """Memory of an accelerator for either model with its adapter, and not for both."""
    options, engine = LoadOptions(batch_size=SEQUENCES, context_length=CONTEXT), EngineOptions(max_sequences=SEQUENCES)
    plans = [PlannedModel(path, options).plan({0: 1 << 30, "cpu": 1 << 30}) for path in folders.values()]
    most = max(claimed_bytes(plan, engine)[0] for plan in plans) + (1 << 18)
    virtual.enable(1, most)
    return {0: most, "cpu": "1GiB"}


class Client:
    """Asks at random, and notes what is wrong with the answers."""

    def __init__(self, url: str, seed: int, texts: dict[tuple[str, int], str]) -> None:
        self.url = url
        self.draw = random.Random(seed)
        self.texts = texts
        self.wrong: list[str] = []
        self.batches: list[str] = []
        self.answered = 0

    def act(self) -> None:
        """Do one thing."""
        with httpx.Client(base_url=self.url, timeout=60) as http:
            self.draw.choices(
                [self.whole, self.streamed, self.left, self.batch, self.batch_cancelled, self.pause],
                [4, 4, 4, 1, 1, 1],
            )[0](http)

    def asked(self, **fields: Any) -> tuple[str, dict[str, Any], dict[str, str]]:
        """A path, body and headers."""
        model, length = self.draw.choice(NAMES), self.draw.choice([1, 4, 30])
        common = {"model": model, "temperature": 0, **fields}
        user = [{"role": "user", "content": "hi"}]
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["cat", "dog"]}}}
        path, body = self.draw.choice(
            [
                ("/v1/completions", {"prompt": "the cat", "max_tokens": length, "ignore_eos": True}),
                ("/v1/chat/completions", {"messages": user, "max_tokens": length, "ignore_eos": True}),
                ("/v1/chat/completions", {"messages": user, "max_tokens": 12, "response_format": form}),
                ("/v1/responses", {"input": "hi", "max_output_tokens": length, "ignore_eos": True}),
                ("/v1/messages", {"messages": user, "max_tokens": length}),
            ]
        )
        headers = {"X-Request-Id": "same"} if self.draw.random() < 0.3 else {}
        return path, {**common, **body}, headers

    def note(self, what: str) -> None:
        """Keep what is wrong."""
        self.wrong.append(what)

    def check(self, path: str, body: dict[str, Any], text: str) -> None:
        """Greedy completions of one model have one text."""
        self.answered += 1
        if path == "/v1/completions":
            known = self.texts.setdefault((body["model"], body["max_tokens"]), text)
            if known != text:
                self.note(f"{body} was answered {text!r} and {known!r}")

    def whole(self, http: httpx.Client) -> None:
        """A request whose answer comes as one."""
        path, body, headers = self.asked()
        answer = http.post(path, json=body, headers=headers)
        if answer.status_code == 200:
            self.check(path, body, answer.json().get("choices", [{}])[0].get("text", ""))
        elif answer.status_code not in REFUSALS or set(answer.json()) - {"error", "type", "request_id"}:
            self.note(f"{path} {body}: {answer.status_code} {answer.text[:300]}")

    def streamed(self, http: httpx.Client) -> None:
        """A stream that is read to its end."""
        path, body, headers = self.asked(stream=True)
        with http.stream("POST", path, json=body, headers=headers) as answer:
            found = answer.read().decode()
        if answer.status_code != 200:
            if answer.status_code not in REFUSALS:
                self.note(f"{path} {body}: {answer.status_code} {found[:300]}")
            return
        events = [json.loads(each[6:]) for each in found.splitlines() if each.startswith("data: {")]
        ends = [each for each in events if each.get("type") in ("response.completed", "response.incomplete")]
        ends += [each for each in events if each.get("type") == "message_stop"]
        errors = [each for each in events if each.get("error")]
        done = found.count("data: [DONE]") + len(ends)
        if done + len(errors) != 1 or errors:
            self.note(f"{path} {body}: the stream ended with {found[-300:]!r}")
        elif path == "/v1/completions":
            self.check(path, body, "".join(each["choices"][0]["text"] for each in events if each["choices"]))

    def left(self, http: httpx.Client) -> None:
        """A request whose client goes at any moment."""
        path, body, _ = self.asked(stream=self.draw.random() < 0.7)
        text = json.dumps(body).encode()
        host, _, port = self.url.removeprefix("http://").partition(":")
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head.encode() + b"\r\n" + text)
            if self.draw.random() < 0.5:
                time.sleep(self.draw.choice([0.0, 0.01, 0.1, 0.3]))
            else:
                with suppress(ConnectionError):
                    connection.recv(self.draw.choice([1, 1000]))

    def batch(self, http: httpx.Client) -> str | None:
        """Begin a batch; at times its input is deleted at once."""
        path = "/v1/completions"
        model = self.draw.choice(NAMES)
        asked = [
            line(f"{number}", url=path, body={"model": model, "prompt": "the cat", "max_tokens": 4, "ignore_eos": True})
            for number in range(self.draw.randint(1, 4))
        ]
        form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("x.jsonl", lines(*asked))}}
        file = http.post("/v1/files", **form).json()["id"]
        body = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
        answer = http.post("/v1/batches", json=body)
        if answer.status_code != 200:
            self.note(f"a batch: {answer.status_code} {answer.text[:300]}")
            return None
        self.batches.append(answer.json()["id"])
        if self.draw.random() < 0.3:
            found = http.delete(f"/v1/files/{file}")
            if found.status_code not in (200, 400, 409):
                self.note(f"deleting the input of a batch: {found.status_code} {found.text[:300]}")
        return self.batches[-1]

    def batch_cancelled(self, http: httpx.Client) -> None:
        """Begin a batch and cancel it soon."""
        name = self.batch(http)
        if name is not None:
            time.sleep(self.draw.choice([0.0, 0.02, 0.2]))
            found = http.post(f"/v1/batches/{name}/cancel")
            if found.status_code not in (200, 400, 409):
                self.note(f"cancelling a batch: {found.status_code} {found.text[:300]}")

    def pause(self, http: httpx.Client) -> None:
        """Models are unloaded where all clients do so."""
        time.sleep(self.draw.choice([0.05, 0.4]))


def held(models: dict[str, ServedModel]) -> list[str]:
    """What requests have left of the models."""
    found = []
    for name, served in models.items():
        if served.leases or served.waiters or served.bringing or served.closing:
            found.append(f"{name}: {served.leases} leases, {len(served.waiters)} wait, {served.bringing}")
        with served.reading() as running:
            if running is not None and running.engine.unfinished:
                found.append(f"{name}: {running.engine.unfinished} sequences")
    return found


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "number"),
    [(1, 5), *(pytest.param(seed, 60, marks=pytest.mark.timeout(600)) for seed in range(2, 12))],
)
def test_clients_at_random_moments_leave_nothing(
    folders: dict[str, str],
    adapters: dict[str, dict[str, str]],
    budgets: dict[Any, int | str],
    tmp_path: Path,
    seed: int,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(batch_calls, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(batch_calls, "RETRY_SECONDS", 0.1)
    app = several_app(folders, budgets, adapters, keep_alive=0.3, batch_folder=tmp_path)
    threads, children, files = set(threading.enumerate()), processes(), open_files()
    reset_peak_memory(0)
    texts: dict[tuple[str, int], str] = {}
    state = app.state.server
    with caplog.at_level(logging.INFO), serving(app) as url:
        wait_ready(url)
        clients = [Client(url, 100 * seed + each, texts) for each in range(CLIENTS)]

        def come(client: Client) -> None:
            for _ in range(number):
                client.act()

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(come, clients))
        assert [wrong for client in clients for wrong in client.wrong] == []
        assert sum(client.answered for client in clients) > 0
        batches = [each for client in clients for each in client.batches]
        with httpx.Client(base_url=url, timeout=60) as http:
            until(lambda: all(http.get(f"/v1/batches/{each}").json()["status"] in ENDED for each in batches))
        until(lambda: not held(state.models))
        until(lambda: all(served.running is None and not served.claimed for served in state.models.values()))
        until(lambda: not state.pool.busy)
        assert memory_allocated(0) == 0
        assert max_memory_allocated(0) <= budgets[0]
        until(lambda: processes() <= children)
        until(lambda: state.large.idle and state.parsing.idle and state.compiling.idle)
    until(lambda: not own_threads(threads))
    until(lambda: len(open_files()) <= len(files))
    assert [
        record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR
    ] == []


def own_threads(before: set[threading.Thread]) -> list[str]:
    """Names of threads of the server that were not there before."""
    return [each.name for each in set(threading.enumerate()) - before if each.name.startswith("bigmodel")]


def open_files() -> list[str]:
    """Sockets, files in memory and files of weights that are open."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [path for path in found if path.startswith(("socket:", "/memfd:")) or path.endswith(".safetensors")]


def processes() -> set[int]:
    """Those that were started from this one, but for that which forks the workers of tests."""
    found = psutil.Process().children(recursive=True)
    return {each.pid for each in found if each.ppid() != os.getpid() or "tests.preloaded" not in each.cmdline()}
