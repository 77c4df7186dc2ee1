"""What once ended a running process of `bigmodel serve`, or held it up: it answers, and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from tokenizers import Regex, normalizers

from bigmodel.benchmarks.hostile_requests import CHAT, COMPLETIONS, TOKENIZE, chat, largest_bodies, post
from bigmodel.benchmarks.serve_client import unchunked
from bigmodel.server.http.client_limits import HEADER_BYTES
from bigmodel.server.http.state import BODY_BYTES, BODY_BYTES_PER_TOKEN, LARGE_OF_A_CLIENT, MOST_BODY_BYTES
from bigmodel.server.text.long_texts import SECONDS
from tests.cli.test_serve_process import Served
from tests.examples import alike
from tests.preloaded import Program
from tests.server.hostile.serve_faults import FAULTS
from tests.server.tiny import fresh_tokenizer, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

CONTEXT, LONG_CONTEXT, DRAFT_CONTEXT = 1024, 1 << 18, 64
LIMIT = BODY_BYTES + BODY_BYTES_PER_TOKEN * CONTEXT
KEY, OTHER_KEY = "sesame", "poppy"
KEPT_BYTES = 64 << 20
"""Memory that a process may keep after many bodies of 8 MB."""


class Attacked(Served):
    """A process that is attacked: requests with a key, and what it holds."""

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def post(self, path: str, body: bytes, key: str = KEY) -> tuple[int, bytes]:
        """Status and body of the answer."""
        answer = self.exchange(post(path, body, f"Authorization: Bearer {key}"))
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head, "closed without an answer"
        return int(head.split(b" ", 2)[1]), unchunked(rest) if b"chunked" in head.lower() else rest

    def connected(self) -> socket.socket:
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def exchange(self, sent: bytes) -> bytes:
        """What is answered until the connection ends; it may be before all was sent, and with bytes unread."""
        answer = b""
        with self.connected() as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(sent)
            with contextlib.suppress(ConnectionError):
                while part := client.recv(1 << 16):
                    answer += part
        return answer

    def refused(self, path: str, body: bytes) -> dict[str, Any]:
        """The error that a body is answered with: a client's, in few bytes."""
        status, answer = self.post(path, body)
        assert 400 <= status < 500, (status, answer[:1000])
        assert status not in (401, 429)
        assert len(answer) <= 1024
        error: dict[str, Any] = json.loads(answer)["error"]
        return {**error, "status": status}

    def generated(self, prompt: list[int], key: str = KEY, **fields: Any) -> dict[str, Any]:
        """What is generated greedily, with its tokens; it does not end before it is as long as it may be."""
        asked = {"model": "tiny", "prompt": prompt, "ignore_eos": True, "temperature": 0, "logprobs": 1}
        status, answer = self.post(COMPLETIONS, json.dumps({**asked, "max_tokens": 8, **fields}).encode(), key)
        assert status == 200, answer
        choice: dict[str, Any] = json.loads(answer)["choices"][0]
        return choice

    def metrics(self) -> dict[str, float]:
        """Values by the name of a metric and its labels."""
        answer = httpx.get(f"{self.url}/metrics", headers={"x-api-key": KEY}, timeout=60)
        lines = (line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def held(self) -> float:
        """Sequences and positions that it holds: 0 for none."""
        names = ("bigmodel_running_sequences", "bigmodel_waiting_sequences", "bigmodel_kv_usage_ratio")
        found = self.metrics()
        return sum(found[name] for name in names)

    @contextlib.contextmanager
    def goes_on(self, *, tracebacks: bool = False) -> Iterator[None]:
        """After this context it answers as before, holds nothing, and has said no traceback, unless it may."""
        before = self.generated([1, 2, 3])
        said = len(self.said())
        yield
        assert self.process.poll() is None
        assert self.status("health") == 200
        assert self.generated([1, 2, 3]) == before
        while self.held():
            time.sleep(0.02)
        assert tracebacks or "Traceback" not in self.said()[said:]


@contextlib.contextmanager
def attacked(folder: Path, *arguments: str) -> Iterator[Attacked]:
    """A process that serves the model in a folder."""
    given = ["serve", folder, "--port", "0", "--max-memory", "cpu=1GiB", "--kv-memory", "256MiB", "--no-prefix-cache"]
    given += ["--api-key", KEY, "--api-key", OTHER_KEY, "--log-level", "warning", *arguments]
    log = folder.parent / "log"
    with log.open("w") as output:
        process = Program(
            ["-m", "tests.server.hostile.serve_faults", *given],
            os.environ,
            stdout=output.fileno(),
            stderr=output.fileno(),
            modules=["bigmodel.cli.serve", "bigmodel.server.http.run", "tests.server.tiny"],
        )
    try:
        yield Attacked(process, log, wait=True)
    finally:
        process.kill()


def saved(folder: Path, tokenizer: Any = None, **changes: Any) -> Path:
    """A folder with the tiny model."""
    tiny_model(**changes).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def slow_tokenizer() -> Any:
    """The tiny one, whose time for a text of "#" grows with the square of its length."""
    tokenizer = fresh_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("#+!"), "")
    return tokenizer


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """One whose draft model has a shorter context."""
    models = tmp_path_factory.mktemp("drafting")
    draft = saved(models / "draft", max_position_embeddings=DRAFT_CONTEXT)
    folder = saved(models / "tiny", max_position_embeddings=CONTEXT)
    with attacked(folder, "--draft-model", str(draft), "--force-speculation") as process:
        yield process


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """One of the same weights and a long context, so that bodies of 8 MB are read."""
    models = tmp_path_factory.mktemp("long")
    folder = saved(models / "tiny", slow_tokenizer(), max_position_embeddings=LONG_CONTEXT)
    with attacked(folder) as process:
        yield process


@pytest.mark.parametrize("depth", [10_000, 60_000])
def test_nested_parentheses_are_refused(drafting: Attacked, depth: int) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install bigmodel[json]")
    schema = {"type": "string", "pattern": "(" * depth + "a" + ")" * depth}
    with drafting.goes_on():
        error = drafting.refused(CHAT, json.dumps(chat("tiny", schema)).encode())
        assert (error["status"], error["param"]) == (400, "response_format")


COSTLY = "^([b-z]{3}|a((" + "".join(f"{letter}?" for letter in "abcdefghijklmnopqrstuvwxyz") + "){0,30}){0,900})$"
"""A pattern that compiles at once, and whose masks behind an "a" take twice as long with each further letter."""


@pytest.mark.long
def test_a_schema_whose_masks_are_costly_fails_alone(drafting: Attacked) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install bigmodel[json]")
    letter = str(tiny_tokenizer().encode("a")[0])
    asked = {**chat("tiny", {"type": "string", "pattern": COSTLY}), "logit_bias": {letter: 100}, "temperature": 0}
    raw = post(CHAT, json.dumps({**asked, "max_tokens": 500}).encode(), f"Authorization: Bearer {KEY}")
    with drafting.goes_on(), ExitStack() as stack:
        attackers = [stack.enter_context(drafting.connected()) for _ in range(2)]
        for attacker in attackers:
            attacker.sendall(raw)
        tokens, steps = 0, drafting.metrics()["bigmodel_step_seconds_count"]
        while not select.select(attackers, [], [], 0)[0]:  # none of them is answered
            tokens += len(drafting.generated([4, 5, 6], OTHER_KEY, max_tokens=32)["logprobs"]["tokens"])
        answers = [b"".join(iter(lambda client=client: client.recv(1 << 16), b"")) for client in attackers]
        assert all(b"takes too much time or memory; describe less of it" in answer for answer in answers), answers
        assert tokens >= 64
        assert drafting.metrics()["bigmodel_step_seconds_count"] > steps
        fine = {"type": "string", "pattern": "^[a-c]{2}$"}  # others still have their formats
        status, answer = drafting.post(CHAT, json.dumps(chat("tiny", fine)).encode())
        assert status == 200, answer


def hostile(size: int) -> dict[str, tuple[str, bytes]]:
    """Paths and bodies of about ``size`` bytes that are wrong in every part."""
    bodies = largest_bodies("tiny", size)
    message = b'{"role":5},'
    field = '"field%07d":1,'
    messages = b'{"model":"tiny","messages":[' + message * (size // len(message) - 9) + b'{"role":5}]}'
    fields = "".join(field % number for number in range(size // len(field % 0) - 9))
    return {
        "wrong tokens": (COMPLETIONS, bodies["wrong tokens"]),
        "biases": (COMPLETIONS, bodies["members"]),
        "messages": (CHAT, messages),
        "unknown fields": (COMPLETIONS, f'{{{fields}"model":"tiny","prompt":"1"}}'.encode()),
        "a model's name": (COMPLETIONS, bodies["a model's name"]),
    }


@pytest.mark.parametrize("name", hostile(1000))
@alike("size", [LIMIT - 1000, MOST_BODY_BYTES - 1000], first=1)
def test_large_wrong_bodies_are_refused_in_few_bytes(drafting: Attacked, name: str, size: int) -> None:
    path, body = hostile(size)[name]
    with drafting.goes_on():
        error = drafting.refused(path, body)
        assert (error["status"] == 413) == (size > LIMIT) or "it has more than" in error["message"], error


def test_memory_comes_back_after_bodies_of_8_mb(long: Attacked) -> None:
    process = psutil.Process(long.process.pid)
    with long.goes_on():
        before = process.memory_info().rss
        for path, body in hostile(MOST_BODY_BYTES - 1000).values():
            error = long.refused(path, body)
            assert "the limit is" not in error["message"], error  # it was read
        end = time.monotonic() + 60
        while process.memory_info().rss > before + KEPT_BYTES:
            assert time.monotonic() < end, process.memory_info().rss - before
            time.sleep(0.05)


@pytest.mark.parametrize(("name", "limit"), [("drafting", LIMIT), ("long", MOST_BODY_BYTES)])
def test_the_longest_body_follows_from_the_context(name: str, limit: int, request: pytest.FixtureRequest) -> None:
    served: Attacked = request.getfixturevalue(name)
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}).encode()
    with served.goes_on():
        assert served.refused(COMPLETIONS, body.ljust(limit + 1))["status"] == 413
        assert served.post(COMPLETIONS, body.ljust(limit))[0] == 200


def test_a_draft_model_with_a_shorter_context_changes_no_token(drafting: Attacked, long: Attacked) -> None:
    prompt = list(range(1, 41))
    before = drafting.metrics()["bigmodel_draft_accepted_tokens_total"]
    with drafting.goes_on():
        found = drafting.generated(prompt, max_tokens=100)
        assert found == long.generated(prompt, max_tokens=100)
        assert len(found["logprobs"]["tokens"]) == 100
        assert drafting.metrics()["bigmodel_draft_accepted_tokens_total"] > before


@pytest.mark.parametrize("name", ["drafting", "long"])
@pytest.mark.parametrize("stage", FAULTS)
def test_a_fault_in_a_step_fails_its_sequence(name: str, stage: str, request: pytest.FixtureRequest) -> None:
    served: Attacked = request.getfixturevalue(name)
    said = len(served.said())
    asked = {"model": "tiny", "prompt": FAULTS[stage], "max_tokens": 8, "ignore_eos": True, "seed": 1}
    with served.goes_on(tracebacks=True):
        status, answer = served.post(COMPLETIONS, json.dumps(asked).encode())
        assert status == 500, answer
        assert b"secret" not in answer
        assert served.status("ready") == 200
    assert "secret detail of the failure" in served.said()[said:]


def refusals_of_the_key(served: Attacked) -> float:
    return served.metrics().get('bigmodel_requests_total{outcome="refused_401"}', 0.0)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
SLOW = [b"", b"POST /v1/comp", HEAD + b"X: 1\r\n"]
ENDLESS = {
    "line": b"GET /" + b"a" * 4 * HEADER_BYTES,
    "header": HEAD + b"X: " + b"a" * 4 * HEADER_BYTES,
    "headers": HEAD + b"X: 1\r\n" * HEADER_BYTES,
}


def test_what_is_a_request_is_asked_for_its_key(drafting: Attacked) -> None:
    before = refusals_of_the_key(drafting)
    answer = drafting.exchange(HEAD + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert refusals_of_the_key(drafting) == before + 1


@pytest.mark.parametrize("name", ENDLESS)
def test_headers_without_end_are_refused_before_a_key_is_asked_for(drafting: Attacked, name: str) -> None:
    before = refusals_of_the_key(drafting)
    with drafting.goes_on():
        answer = drafting.exchange(ENDLESS[name])
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 "), answer
        assert refusals_of_the_key(drafting) == before


def test_slow_headers_are_cut_before_a_key_is_asked_for(drafting: Attacked) -> None:
    before = refusals_of_the_key(drafting)
    with drafting.goes_on(), ExitStack() as stack:
        clients = [stack.enter_context(drafting.connected()) for _ in SLOW]
        for client, sent in zip(clients, SLOW, strict=True):
            client.sendall(sent)
        assert drafting.status("health") == 200
        assert [client.recv(100) for client in clients] == [b""] * len(SLOW)  # closed by the server
        assert refusals_of_the_key(drafting) == before


@pytest.mark.parametrize("close", [False, True])
def test_a_client_that_sends_its_whole_body_first_reads_why_it_is_refused(drafting: Attacked, close: bool) -> None:
    body = b" " * MOST_BODY_BYTES
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n" % KEY.encode()
    head += b"Connection: close\r\n" if close else b""
    with drafting.goes_on(), drafting.connected() as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 413 "), answer


def test_a_refused_body_without_end_is_cut(drafting: Attacked) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n" % (1 << 40)
    part = b" " * (1 << 20)
    with drafting.goes_on(), drafting.connected() as client:
        client.sendall(head + b"Authorization: Bearer %s\r\n\r\n" % KEY.encode())
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(part)


def test_a_user_message_without_content_is_refused(drafting: Attacked) -> None:
    with drafting.goes_on():
        error = drafting.refused(CHAT, b'{"model": "tiny", "messages": [{"role": "user"}]}')
        assert "messages" in error["param"]
        assert "content" in error["param"] + error["message"]


def test_clients_that_leave_while_their_texts_are_tokenised_hold_up_nobody(long: Attacked) -> None:
    body = json.dumps({"model": "tiny", "prompt": "the cat in " * (LONG_CONTEXT // 9)}).encode()
    raw = post(TOKENIZE, body, f"Authorization: Bearer {KEY}")
    with long.goes_on():
        left: set[socket.socket] = set()
        while not left:
            with ExitStack() as stack:
                clients = {stack.enter_context(long.connected()) for _ in range(LARGE_OF_A_CLIENT + 1)}
                for client in clients:
                    client.sendall(raw)
                assert long.generated([4, 5, 6], OTHER_KEY)["finish_reason"] == "length"
                left = clients - set(select.select(clients, [], [], 0)[0])  # they have no answer yet
        status, answer = long.post(TOKENIZE, body)  # the turns of those that left are free
        assert status == 200, answer
        assert json.loads(answer)["count"] > LONG_CONTEXT // 2


def descendants(served: Attacked) -> set[psutil.Process]:
    """Processes of the server that have not ended, beside its own."""
    found = set()
    for process in psutil.Process(served.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


ENDLESS_TEXT = "#" * 150_000
"""A text of which tokens are made for more than a minute."""
ENDLESS_TEXTS = {
    CHAT: {"messages": [{"role": "user", "content": ENDLESS_TEXT}]},
    COMPLETIONS: {"prompt": ["a", ENDLESS_TEXT]},
    TOKENIZE: {"prompt": ENDLESS_TEXT},
    "/v1/embeddings": {"input": ["a", ENDLESS_TEXT], "truncate_prompt_tokens": 200_000},
    "/v1/messages": {"messages": [{"role": "user", "content": ENDLESS_TEXT}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": ENDLESS_TEXT}]},
    "/v1/responses": {"input": ENDLESS_TEXT},
}


@alike("path", list(ENDLESS_TEXTS), first=2)
def test_what_a_client_that_leaves_sent_is_not_tokenised_to_its_end(long: Attacked, path: str) -> None:
    raw = post(path, json.dumps({"model": "tiny", **ENDLESS_TEXTS[path]}).encode(), f"Authorization: Bearer {KEY}")
    fine = json.dumps({"model": "tiny", "prompt": "the cat in " * 10_000}).encode()
    with long.goes_on():
        assert long.post(TOKENIZE, fine)[0] == 200  # the process that forks runs
        before = descendants(long)
        with long.connected() as client:
            client.sendall(raw)
            while not (begun := descendants(long) - before):
                assert not select.select([client], [], [], 0.01)[0], client.recv(1000)
        used = 0.0
        while running := begun & descendants(long):
            with contextlib.suppress(psutil.NoSuchProcess):
                used = max(used, *(process.cpu_times().user for process in running))
        assert used < SECONDS / 2  # it was ended, and not by its limit
        assert long.post(TOKENIZE, fine)[0] == 200  # the client's turn has ended
        while not descendants(long) <= before:  # the process of an answer ends soon after it
            time.sleep(0.01)


@pytest.mark.long
def test_a_text_that_takes_too_long_fails_alone(long: Attacked) -> None:
    body = json.dumps({"model": "tiny", "prompt": ENDLESS_TEXT}).encode()
    with long.goes_on():
        error = long.refused(TOKENIZE, body)
    assert (error["status"], error["code"]) == (400, "text_not_tokenised")
    assert "too much time or memory" in error["message"]
