"""Clients of other projects are run with the same load, and their reports are read."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigmodel.benchmarks.harness import BenchmarkError
from bigmodel.benchmarks.serve_load_client import Load
from bigmodel.benchmarks.serve_load_peers import GUIDELLM, VLLM, Peer, Target, interpreter, version, write_load

LOAD = Load(["1 2 3", "4 5"], [3, 2], 4, 5.0, [0.1, 0.4], seed=7)
TARGET = Target("http://127.0.0.1:9", "name", Path("folder"))


def summary(p50: float, p95: float, p99: float, mean: float = 0.0) -> dict[str, Any]:
    values = {"mean": mean, "percentiles": {"p25": 0.0, "p50": p50, "p95": p95, "p99": p99}}
    return {"successful": values, "total": {"mean": -1.0}}


def running(code: str) -> Peer:
    """A client that is this Python code."""
    return replace(GUIDELLM, name="other", arguments=lambda target, load, folder: ["-c", code])


def test_a_report_of_guidellm_is_read() -> None:
    metrics = {
        "time_to_first_token_ms": summary(100, 250, 300, mean=125),
        "inter_token_latency_ms": summary(10, 20, 30),
        "output_tokens_per_second": summary(0, 0, 0, mean=64.5),
    }
    found = GUIDELLM.figures({"benchmarks": [{"metrics": metrics}]})
    assert found == {
        "first token, mean": 0.125,
        "tokens/s": 64.5,
        "first token p50": 0.1,
        "first token p95": 0.25,
        "first token p99": 0.3,
        "per output token p50": 0.01,
        "per output token p95": 0.02,
        "per output token p99": 0.03,
    }


def test_a_result_of_vllm_is_read() -> None:
    names = [f"p{p}_{key}_ms" for key in ("ttft", "tpot", "itl") for p in (50, 95, 99)]
    values = {name: 1000.0 * number for number, name in enumerate(names)}
    found = VLLM.figures({**values, "mean_ttft_ms": 250.0, "output_throughput": 64.5})
    assert found == {
        "first token, mean": 0.25,
        "tokens/s": 64.5,
        **{
            f"{name} p{p}": 3.0 * row + at
            for row, name in enumerate(["first token", "per output token", "gap"])
            for at, p in enumerate((50, 95, 99))
        },
    }


def test_the_load_is_written_for_others(tmp_path: Path) -> None:
    write_load(LOAD, tmp_path)
    prompts, trace = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("prompts", "trace"))
    assert list(map(json.loads, prompts)) == [{"prompt": "1 2 3"}, {"prompt": "4 5"}]
    assert list(map(json.loads, trace)) == [
        {"timestamp": 0.1, "input_length": 3, "output_length": 4},
        {"timestamp": 0.4, "input_length": 2, "output_length": 4},
    ]


def test_vllm_is_asked_for_the_same_requests_at_the_same_times(tmp_path: Path) -> None:
    asked = " ".join(VLLM.arguments(TARGET, LOAD, tmp_path))
    for part in ("--request-rate 5.0", "--seed 7", "--num-prompts 2", "--custom-output-len 4", "--disable-shuffle"):
        assert part in asked


@pytest.mark.slow
def test_a_client_finds_the_load_and_leaves_a_report() -> None:
    code = "import json, pathlib; json.dump(len(open('trace.jsonl').readlines()), open('report.json', 'w'))"
    peer = replace(running(code), figures=lambda report: {"lines": report})
    assert peer.measure(sys.executable, TARGET, LOAD) == {"lines": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [("import sys; sys.exit('first\\nno such model')", "exit 1.: no such model"), ("print('done')", "exit 0.: done")],
)
def test_a_client_that_fails_or_leaves_no_report_is_reported_by_its_last_line(code: str, said: str) -> None:
    with pytest.raises(BenchmarkError, match=f"other failed .{said}"):
        running(code).measure(sys.executable, TARGET, LOAD)


def test_a_client_is_found_where_it_is_said_to_be_or_here() -> None:
    assert interpreter("no_such_package", None) is None
    assert interpreter("no_such_package", "python-of-it") == "python-of-it"
    assert interpreter("torch", None) == sys.executable


@pytest.mark.slow
def test_an_interpreter_without_the_package_is_refused(tmp_path: Path) -> None:
    assert version(sys.executable, "pytest") == pytest.__version__
    with pytest.raises(BenchmarkError, match="does not have the package no-such-package"):
        version(sys.executable, "no-such-package")
    with pytest.raises(BenchmarkError, match=f"{os.sep}nothing cannot be run: No such file"):
        version(str(tmp_path / "nothing"), "pytest")
