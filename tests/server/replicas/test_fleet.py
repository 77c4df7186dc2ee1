"""Any replica answers /metrics and /plan for all, from the reports on the board and its own current one."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from bigmodel.server.replicas.fleet import Fleet, ReplicaReport, ReportBoard
from tests.server.http.test_metrics import value
from tests.server.live import MODEL, serving, tiny_app


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


ONE, TWO, THREE = (ReplicaReport(metrics, {}) for metrics in ("one", "two", "three"))


def test_the_board_keeps_the_last_report_of_each_replica() -> None:
    board = ReportBoard(Clock())
    board.put("a", ONE)
    board.put("b", TWO)
    board.put("a", THREE)
    assert board.reports() == ({"a": THREE, "b": TWO}, {})


def test_a_silent_replica_is_gone_until_it_reports_again() -> None:
    clock = Clock()
    board = ReportBoard(clock)
    board.put("a", ONE)
    clock.now += 9
    board.put("b", TWO)
    clock.now += 9
    assert board.reports() == ({"b": TWO}, {"a": ONE})
    board.put("a", THREE)
    assert board.reports() == ({"a": THREE, "b": TWO}, {})


def counted(number: int) -> str:
    return f"# TYPE done counter\ndone_total {number}.0\n"


class Own:
    """What a replica reports of itself."""

    def __init__(self, done: int = 0, state: str = "running") -> None:
        self.done = done
        self.state = state

    def metrics(self) -> bytes:
        return counted(self.done).encode()

    def plan(self) -> dict[str, Any]:
        return {
            "model": "m",
            "plan": None,
            "devices": [],
            "streamed": [],
            "engine": {"state": self.state, "max_length": 1},
            "images": False,
        }


def test_metrics_add_up_and_its_own_are_current() -> None:
    board, own = ReportBoard(), Own(done=1)
    fleet = Fleet(own, board, "b")
    board.put("a", ReplicaReport(counted(5), {}))
    assert b"done_total 6.0" in fleet.metrics()
    own.done = 2
    assert b"done_total 7.0" in fleet.metrics()


def test_replicas_are_listed_in_the_order_of_names() -> None:
    board = ReportBoard()
    fleets = [Fleet(Own(state=name), board, name) for name in ("b", "a")]
    for fleet in fleets:
        fleet.plan()
    listed = fleets[0].plan()["replicas"]
    assert [(each["name"], each["engine"]["state"]) for each in listed] == [("a", "a"), ("b", "b")]
    assert all(each["machine"] for each in listed)


@pytest.mark.slow
def test_metrics_and_plan_are_of_all_replicas() -> None:
    board = ReportBoard()
    first, second = tiny_app(), tiny_app()
    for app, name in ((first, "first"), (second, "second")):
        app.state.server.reporter = Fleet(app.state.server.reporter, board, name)
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


@pytest.mark.slow
def test_a_report_that_fails_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    reported = threading.Event()

    class Listening(ReportBoard):
        def put(self, replica: str, report: ReplicaReport) -> None:
            reported.set()

    class FailingOnce(Own):
        failures = iter([RuntimeError("not now")])

        def plan(self) -> dict[str, Any]:
            for error in self.failures:
                raise error
            return super().plan()

    Fleet(FailingOnce(), Listening(), "a").start()
    assert reported.wait(60)
    assert "could not report" in caplog.text
