"""Schemas that would stop or end a server that compiles them itself."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import httpx
import psutil
import pytest

from tests.server.live import MODEL
from tests.server.tiny import tiny_tokenizer

pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install bigmodel[json]")

from bigmodel.server.engine.sampling import grammar_worker
from bigmodel.server.engine.sampling.expressions import json_text
from bigmodel.server.engine.sampling.grammar import GrammarCompiler, GrammarError
from tests.examples import alike


@cache
def worker_of() -> GrammarCompiler:
    made = GrammarCompiler(tiny_tokenizer(), 261, (260,))
    made._worker._hello = made._worker._hello.replace('"seconds": 5.0', '"seconds": 0.2')
    atexit.register(made.close)
    return made


def pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


BOMBS = {
    "nested parentheses": pattern("(" * 60_000 + "a" + ")" * 60_000),
    "repeated repeats": pattern("((((.{0,900}){0,900}){0,900}){0,900}){0,900}"),
    "a long text": pattern("a" * 1_000_000),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name != "nested parentheses" else ()) for name in BOMBS]
)
def test_an_expensive_schema_is_refused_and_the_next_one_compiles(name: str) -> None:
    # By its processor time, its memory, or on a machine that is busy the time that a client waits.
    with pytest.raises(GrammarError, match="describe less of the answer"):
        worker_of().compile(json_text(BOMBS[name]))
    worker_of().compile(json_text({"type": "string", "pattern": "^[a-z]{2}$"}))


def test_the_client_tries_again_where_the_process_that_compiles_was_ended(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise grammar_worker.WorkerEndedError("the process that compiles it ended; try again")

    monkeypatch.setattr(grammar_worker.GrammarWorker, "compile", ended)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": pattern("^[a-e]{7}$")}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "response_format": schema}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=100)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "grammar_gone")
    assert answer.headers["retry-after"] == "1"
    monkeypatch.undo()
    assert httpx.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 8}, timeout=100).status_code == 200


def test_a_refused_schema_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker_of()
    bomb = {"type": "string", "pattern": "(" * 70_000 + "a" + ")" * 70_000}
    with pytest.raises(GrammarError):
        made.compile(json_text(bomb))
    monkeypatch.setattr(made._worker, "compile", None)
    with pytest.raises(GrammarError):
        made.compile(json_text(bomb))


def test_a_schema_of_nested_parentheses_does_not_end_the_server(url: str) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": BOMBS["nested parentheses"]},
        },
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=100)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert len(answer.content) <= 1024
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc"), Exception("std::bad_alloc")])
def test_whatever_says_that_there_is_no_memory_is_told_with_the_limit(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_text(*_: Any) -> str:
        raise error

    monkeypatch.setattr(grammar_worker, "grammar_text", no_text)
    answer = json.loads(grammar_worker._compiled(None, None, json.dumps(json_text({})), 261, True))
    assert answer == {"error": "compiling it takes more than 1024 MiB of memory; describe less of the answer"}


@cache
def own_compiler() -> GrammarCompiler:
    made = GrammarCompiler(tiny_tokenizer(), 261, (260,))
    atexit.register(made.close)
    return made


_numbers = itertools.count()


def unseen(schema: dict[str, Any]) -> dict[str, Any]:
    """The expression of a schema, another at each call: a compiler keeps what it compiled or refused."""
    return json_text({**schema, "description": str(next(_numbers))})


@pytest.fixture
def own() -> Iterator[GrammarCompiler]:
    """A compiler whose worker runs: a process of its own interpreter, not forked from a preloaded one. Tests that do
    not end it leave it to the next one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bigmodel.server.forked.sys", sys)
        made = own_compiler()
        made.compile(unseen(pattern("^[a-c]{2}$")))
        yield made


def process_of(made: GrammarCompiler) -> subprocess.Popen[bytes]:
    process = made._worker._process
    assert process is not None
    return process


def is_running(process: psutil.Process) -> bool:
    """Whether a process computes; one that ended may stay in the list for want of a parent that asks for it."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.long
@pytest.mark.slow
def test_a_bomb_ends_a_child_and_not_the_process_that_has_imported_the_libraries(own: GrammarCompiler) -> None:
    before = process_of(own)
    with pytest.raises(GrammarError, match="takes too much memory or stack"):
        own.compile(unseen(BOMBS["nested parentheses"]))
    own.compile(unseen(pattern("^[a-d]{3}$")))
    assert process_of(own) is before


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_that_ended_is_started_again(own: GrammarCompiler) -> None:
    process_of(own).kill()
    wanted = unseen(pattern("^[a-c]{6}$"))
    with pytest.raises(GrammarError, match="try again"):
        own.compile(wanted)
    own.compile(wanted)


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_has_a_group_of_its_own_in_the_session_where_its_niceness_counts(own: GrammarCompiler) -> None:
    own.compile(json_text(pattern("^[a-c]{8}$")))
    worker = process_of(own).pid
    assert os.getpgid(worker) == worker
    assert os.getsid(worker) == os.getsid(0)
    assert os.getpriority(os.PRIO_PROCESS, worker) >= 10


@pytest.mark.long
@pytest.mark.slow
@alike("starved", [False, True], first=1)
def test_a_child_leaves_processors_to_others_and_ends_with_the_server(own: GrammarCompiler, starved: bool) -> None:
    process, pipe = process_of(own), own._worker._pipe
    assert pipe is not None

    def compile_bomb() -> None:
        with pytest.raises(GrammarError):
            own.compile(unseen(BOMBS["repeated repeats"]))

    compiling = threading.Thread(target=compile_bomb)
    compiling.start()
    matching = psutil.Process(process.pid).children()  # what forks a process for each sequence
    while not (children := [one for one in psutil.Process(process.pid).children() if one not in matching]):
        assert compiling.is_alive()
        time.sleep(0.01)
    while os.sched_getscheduler(children[0].pid) != os.SCHED_IDLE:  # it computes only where the engine does not
        assert compiling.is_alive()
        time.sleep(0.01)
    if starved:  # both, as where other programs take the processor
        for each in (process, *children):
            each.send_signal(signal.SIGSTOP)
    with socket.socket(fileno=os.dup(pipe.fileno())) as server:
        server.shutdown(socket.SHUT_RDWR)  # as when the server has ended
    compiling.join(50)
    assert process.wait(50) is not None
    end = time.monotonic() + 50
    own.close()  # the other connection to it
    while any(is_running(child) for child in (*children, *matching)):
        assert time.monotonic() < end
        time.sleep(0.01)
