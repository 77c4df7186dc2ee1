"""The serving questions can be asked, in their quick form, and what they promise holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigmodel.benchmarks import serve_peer, serve_throughput
from bigmodel.benchmarks.command import main
from bigmodel.benchmarks.serve_client import unchunked
from bigmodel.benchmarks.serve_latency import percentiles
from bigmodel.benchmarks.serve_model import equal_jobs, ragged_jobs
from tests.examples import alike


def ask(question: str, folder: Path, *arguments: str) -> None:
    assert main([question, "--quick", "--rounds", "1", "--check", "--results", str(folder), *arguments]) == 0


@pytest.mark.slow
@alike(
    "asked",
    [
        "serve-linear",
        "serve-http",
        "serve-latency --per-second 100",
        "serve-streamed --tokens 4",
        "serve-hybrid --models mamba2 --tokens 3 --requests 2",
        "serve-swap",
    ],
    first=1,
)
def test_it_answers(asked: str, tmp_path: Path) -> None:
    question, *options = asked.split()
    ask(question, tmp_path, *options)
    (result,) = tmp_path.glob("*.json")
    assert json.loads(result.read_text())


@pytest.mark.slow
def test_equal_requests_are_compared_with_static_batching_of_equal_requests(tmp_path: Path) -> None:
    ask("serve-throughput", tmp_path, "--tokens", "4")
    (result,) = tmp_path.glob("*.json")
    rows = json.loads(result.read_text())["tables"][0]["rows"]
    found = {row["way"]: row for row in rows}
    pairs = [
        (serve_throughput.STREAM, serve_throughput.STATIC),
        (serve_throughput.EQUAL, serve_throughput.EQUAL_STATIC),
    ]
    for engine, static in pairs:
        ratio = found[engine]["tokens/s"] / found[static]["tokens/s"]
        assert found[engine]["of static batching"] == pytest.approx(ratio)
        assert found[static]["of static batching"] == 1
    lengths = {len(job.prompt) for job in equal_jobs(16, seed=0, tokens=4)}
    assert len(lengths) == 1


@pytest.mark.slow
def test_a_served_process_is_measured_beside_a_peer(tmp_path: Path) -> None:
    ask("serve-peer", tmp_path, "--no-peer", "--requests", "2", "--workdir", str(tmp_path))
    (result,) = tmp_path.glob("*.json")
    assert json.loads(result.read_text())


@pytest.mark.slow
def test_a_server_that_does_not_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(serve_peer.MAIN_MODULES, serve_peer.OURS, "no_such_module")
    with (
        pytest.raises(RuntimeError, match=r"bigmodel serve did not start: .*no_such_module"),
        serve_peer.serving(serve_peer.OURS, tmp_path, None),
    ):
        pass


@pytest.mark.long
@pytest.mark.slow
def test_a_crowd_of_all_kinds_leaves_nothing_behind(tmp_path: Path) -> None:
    ask("serve-clients", tmp_path, "--clients", "6")


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([float(n) for n in range(1, 101)]) == [50, 95, 99]
    assert percentiles([3.0]) == [3, 3, 3]


def test_jobs_repeat_and_arrive_in_order() -> None:
    jobs = ragged_jobs(10, seed=1, tokens=4, per_second=5)
    assert jobs == ragged_jobs(10, seed=1, tokens=4, per_second=5)
    assert [job.arrives for job in jobs] == sorted(job.arrives for job in jobs)
    assert jobs[0].arrives == 0
    assert all(16 <= len(job.prompt) <= 200 for job in jobs)


def test_chunks_are_joined() -> None:
    assert unchunked(b"3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n") == b"abc0123456789abcdef"
