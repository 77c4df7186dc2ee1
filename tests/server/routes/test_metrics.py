"""GET /metrics: Prometheus' text format, of this server, or of all replicas where there are several."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bigmodel.server.fleet import Fleet
from bigmodel.server.replica_board import Board, Word
from tests.server.live import serving, tiny_app


def test_it_is_prometheus_text(url: str) -> None:
    answer = httpx.get(f"{url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {"bigmodel_requests", "bigmodel_generated_tokens", "bigmodel_running_sequences"} <= names


def test_replicas_answer_for_all_of_them() -> None:
    board, app = Board(), tiny_app()
    board.put("other", Word("# TYPE done counter\ndone_total 5.0\n", {}))
    app.state.server.fleet = Fleet(lambda: Word("# TYPE done counter\ndone_total 2.0\n", {}), board, "this")
    with serving(app) as url:
        assert "done_total 7.0" in httpx.get(f"{url}/metrics").text
