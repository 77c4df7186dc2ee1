"""A server's times under load are measured by several clients."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bigmodel.benchmarks.command import main
from bigmodel.benchmarks.harness import Samples
from bigmodel.benchmarks.serve_load import OURS, drawn_load, spaced_tokenizer, tables
from tests.benchmarks.answering import rows

NAMES = ["first token, mean", "server's mean", "server's p95", "tokens/s", "sequences in a step"]
NAMES += [f"{name} p{p}" for name in ("first token", "per output token") for p in (50, 95, 99)]


@pytest.mark.slow
def test_our_client_and_the_server_agree_and_missing_peers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigmodel.benchmarks.serve_load_peers.find_spec", lambda name: None)
    options = ["--quick", "--rounds", "1", "--request-rate", "50", "--workdir", str(tmp_path / "work")]
    assert main(["serve-load", *options, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("serve_load-*.json")
    found = json.loads(path.read_text())
    (row,) = rows(found)
    assert row["client"] == OURS
    assert 0 < row["server's mean"] <= row["mean"] <= row["p99"]
    assert row[f"p95 over {OURS}"] == 1
    assert rows(found, 1)[0]["gap p95"] > 0
    assert sum("was not measured" in note for note in found["notes"]) == 2


@pytest.mark.slow
def test_a_client_that_sends_other_requests_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"successful": {"mean": 1, "percentiles": {"p50": 1, "p95": 1, "p99": 1}}}
    names = ["time_to_first_token_ms", "inter_token_latency_ms", "output_tokens_per_second"]
    report = json.dumps({"benchmarks": [{"metrics": dict.fromkeys(names, summary)}]})
    silent = tmp_path / "python"  # it has a version and leaves a report, but sends nothing
    silent.write_text(f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo 1.0; else echo '{report}' > report.json; fi\n")
    silent.chmod(0o755)
    options = ["--quick", "--request-rate", "50", "--rounds", "1", "--workdir", str(tmp_path)]
    assert main(["serve-load", *options, "--guidellm", str(silent)]) == 1
    assert "tokens that a client sent are (0, 0, 0) instead of (8, " in capsys.readouterr().err


def test_a_text_has_as_many_tokens_as_it_was_made_of() -> None:
    load, tokenizer = drawn_load(5, 4, 2.0, seed=3), spaced_tokenizer()
    for prompt, length in zip(load.prompts, load.prompt_tokens, strict=True):
        ids = tokenizer(prompt).input_ids
        assert len(ids) == length
        assert tokenizer.decode(ids) == prompt


def test_clients_are_compared_by_their_p95_and_may_lack_a_figure() -> None:
    samples = Samples()
    for value in (1.0, 2.0, 3.0):
        ours = {**dict.fromkeys(NAMES, value), **{f"gap p{p}": value for p in (50, 95, 99)}}
        samples.add(OURS, ours)
        samples.add("other", {**dict.fromkeys(NAMES, value), "first token p95": 1.5 * value})
    first, between = (table.records() for table in tables(samples, "title"))
    assert [row[f"p95 over {OURS}"] for row in first] == [1, 1.5]
    assert [row["p95"] for row in first] == [2, 3]
    assert [row["gap p95"] for row in between] == [2, None]
    assert all(math.isclose(float(row["tokens/s"] or 0), 2) for row in between)
