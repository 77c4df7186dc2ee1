"""guidellm measures the server with texts that it makes up."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bigmodel.benchmarks.command import run
from tests.server.live import MODEL

if find_spec("guidellm") is None:  # its import takes seconds
    pytest.skip("guidellm is not installed: make clients installs it", allow_module_level=True)

ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_every_request_is_answered(url: str, tokenizer_folder: Path, tmp_path: Path, route: str) -> None:
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={url},model={MODEL},request_format={route}",
        "profile": "kind=concurrent,streams=[2]",
        "constraint": "kind=max_requests,count=4",
        "tokenizer": f"kind=hf_auto,model={tokenizer_folder}",
        "data": "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "guidellm", "run", *flags, "--disable-console"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 0, ended.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [len(requests[kind]) for kind in ("successful", "errored", "incomplete")] == [4, 0, 0]
    if route != "/v1/embeddings":
        assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {8}


@pytest.mark.slow
def test_its_percentiles_are_shown_beside_ours(tmp_path: Path) -> None:
    options = ["--quick", "--rounds", "1", "--request-rate", "20", "--workdir", str(tmp_path / "work")]
    assert run(["serve-load", *options, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("serve_load-*.json")
    shown = {row["client"]: row for row in json.loads(path.read_text())["tables"][0]["rows"]}
    assert 0 < shown["guidellm"]["server's mean"] <= shown["guidellm"]["mean"] <= shown["guidellm"]["p99"]
