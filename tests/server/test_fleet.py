"""Whichever replica is asked answers for all, with its own newest word among them."""

from __future__ import annotations

import threading
from functools import partial

import httpx
import pytest

from bigmodel.server.fleet import Fleet
from bigmodel.server.replica_board import Board, Word
from bigmodel.server.state import ServerState
from bigmodel.server.view import view
from tests.server.live import MODEL, serving, tiny_app
from tests.server.test_metrics import value


def word(state: ServerState) -> Word:
    return Word(state.metrics.render().decode(), view(state))


def counted(number: int) -> str:
    return f"# TYPE done counter\ndone_total {number}.0\n"


def test_numbers_add_up_and_its_own_are_new() -> None:
    board = Board()
    done = 1
    fleet = Fleet(lambda: Word(counted(done), {}), board, "b")
    board.put("a", Word(counted(5), {}))
    assert b"done_total 6.0" in fleet.metrics()
    done = 2
    assert b"done_total 7.0" in fleet.metrics()


def test_each_replica_is_named_in_the_order_of_names() -> None:
    board = Board()
    fleets = [Fleet(partial(Word, "", {"engine": name}), board, name) for name in ("b", "a")]
    for fleet in fleets:
        fleet.views()
    assert [(each["name"], each["engine"]) for each in fleets[0].views()] == [("a", "a"), ("b", "b")]
    assert all(each["machine"] for each in fleets[0].views())


def test_metrics_and_plan_are_of_all_replicas() -> None:
    board = Board()
    first, second = tiny_app(), tiny_app()
    for app, name in ((first, "first"), (second, "second")):
        app.state.server.fleet = Fleet(partial(word, app.state.server), board, name)
    with serving(first) as one, serving(second) as two:
        body = {"model": MODEL, "prompt": "the cat", "max_tokens": 3, "ignore_eos": True}
        for url in (one, one, two):
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        httpx.get(f"{one}/plan")
        shown = httpx.get(f"{two}/plan").json()
        assert value(two, "bigmodel_generated_tokens_total") == 9
    assert shown["engine"]["generated_tokens"] == 9
    assert [(each["name"], each["engine"]["generated_tokens"]) for each in shown["replicas"]] == [
        ("first", 6),
        ("second", 3),
    ]
    (cpu,) = shown["devices"]
    assert cpu["weights"] == sum(each["devices"][0]["weights"] for each in shown["replicas"])


def test_a_word_that_cannot_be_said_is_said_later(caplog: pytest.LogCaptureFixture) -> None:
    said = threading.Event()

    class Listening(Board):
        def put(self, replica: str, word: Word) -> None:
            said.set()

    words = iter([RuntimeError("not now")])

    def own() -> Word:
        for error in words:
            raise error
        return Word("", {})

    Fleet(own, Listening(), "a").start()
    assert said.wait(60)
    assert "could not tell" in caplog.text


def test_a_lone_server_has_no_replicas(url: str) -> None:
    assert httpx.get(f"{url}/plan").json()["replicas"] == []
