"""`bigmodel serve --nodes` in three processes, as its clients and its supervisor see it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bigmodel.cli.main import run
from bigmodel.cli.serve_nodes import plan_for
from bigmodel.errors import LaunchError, PlanError
from bigmodel.plan import plan_nodes, read_nodes
from tests.preloaded import ROOT, Program, program_of, python_executable
from tests.server.live import serving, tiny_app
from tests.server.tiny import tiny_model, tiny_tokenizer

MODULES = ("bigmodel.nodes", "bigmodel.server.http.run", "transformers.models.llama.modeling_llama")
"""What the processes import, beside what every preloaded program has."""
ASKED = {"model": "tiny", "prompt": "the cat", "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(layers=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    nodes = [{"name": name, "max_memory": {"cpu": "100MB"}, "machine": "nominal"} for name in ("a", "b", "c")]
    content = {"nodes": nodes, "link": {"rate": "1GB", "latency": 0.002}}
    (path.parent / "nodes.json").write_text(json.dumps(content))
    return path


class Deployment:
    """The process of the command, and those that it has started."""

    def __init__(self, process: Program, log: Path) -> None:
        self.process, self._log = process, log
        self.url = self.until(lambda: re.search(r"^serving tiny over 3 nodes on (http://\S+)$", log.read_text(), re.M))[
            1
        ]

    def until(self, found: Any) -> Any:
        """What `found` gives, once it does."""
        end = time.monotonic() + 150
        while not (value := found()):
            assert time.monotonic() < end, self._log.read_text()
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.02)
        return value

    def ready(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready").status_code == 200
        return False

    def stages(self) -> list[psutil.Process]:
        """The processes of the stages, by rank."""
        started = [each for each in psutil.Process(self.process.pid).children() if "RANK" in each.environ()]
        started.sort(key=lambda each: int(each.environ()["RANK"]))
        return [psutil.Process(program_of(each.pid)) for each in started]

    def complete(self, **fields: object) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={**ASKED, **fields}, timeout=100)


@contextmanager
def deployed(folder: Path, log: Path, *arguments: str) -> Iterator[Deployment]:
    """The command, whose processes are forked with all that they import."""
    command = ["-m", "bigmodel", "serve", str(folder), "--nodes", str(folder.parent / "nodes.json")]
    command += ["--port", "0", "--max-sequences", "4", "--max-model-len", "512", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PYTHON_EXEC"] = str(python_executable(*MODULES))
    log.touch()
    with log.open("w") as output:
        process = Program(command, environment, stdout=output.fileno(), stderr=output.fileno(), modules=MODULES)
    try:
        yield Deployment(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_stage_ends_requests_clearly_and_the_deployment_comes_back_with_the_tokens_of_one_process(
    folder: Path, tmp_path: Path
) -> None:
    """One deployment also shows how it ends: its processes take seconds to start."""
    with serving(tiny_app(tiny_model(layers=3), engine={"prefix_cache": False})) as alone:
        expected = httpx.post(f"{alone}/v1/completions", json={**ASKED, "max_tokens": 8}, timeout=60).json()["choices"]
    with deployed(folder, tmp_path / "log", "--slow-links") as served:
        served.until(served.ready)
        assert served.complete(max_tokens=8).json()["choices"] == expected
        whole: list[httpx.Response] = []
        waits = threading.Thread(target=lambda: whole.append(served.complete(max_tokens=500)))
        waits.start()
        body = {**ASKED, "max_tokens": 500, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=100) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            before = served.stages()
            assert len(before) == 3
            before[1].kill()
            last = list(lines)[-1]
        waits.join(60)
        assert re.search(r"node '[bc]' \(rank \d\) no longer answers", json.loads(last[6:])["error"]["message"])
        assert whole[0].status_code == 503
        assert whole[0].json()["error"]["code"] == "node_lost"
        served.until(lambda: not any(each.is_running() for each in before))
        served.until(served.ready)
        assert served.complete(max_tokens=8).json()["choices"] == expected
        after = served.stages()
        # A running request finishes after SIGTERM.
        body = {**ASKED, "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=100) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert served.process.wait(60) == 0
        assert not any(each.is_running() for each in after)


@pytest.mark.slow
def test_a_plan_is_taken_as_it_is_and_a_description_is_planned(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    described = folder.parent / "nodes.json"
    made = plan_nodes(folder, read_nodes(described), 4, 256)
    (tmp_path / "plan.json").write_text(made.to_json())
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert plan_for(str(folder), tmp_path / "plan.json", {}) == made
    with pytest.raises(LaunchError, match="make one plan for all processes"):
        plan_for(str(folder), described, {})
    monkeypatch.delenv("WORLD_SIZE")
    found = plan_for(str(folder), described, {"batch_size": 4, "context_length": 256})
    assert [(stage.start, stage.stop) for stage in found.stages] == [(stage.start, stage.stop) for stage in made.stages]
    (tmp_path / "torn.json").write_text('{"stages"')
    with pytest.raises(PlanError, match="cannot be read"):
        plan_for(str(folder), tmp_path / "torn.json", {})


def test_options_of_one_process_are_refused(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    given = [
        "serve",
        str(folder),
        "--nodes",
        str(folder.parent / "nodes.json"),
        "--lora",
        "x=y",
        "--max-memory",
        "cpu=1GB",
    ]
    assert run(given) == 2
    assert "--max-memory, --lora: not with --nodes" in capsys.readouterr().err
