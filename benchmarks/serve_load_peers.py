"""guidellm and `vllm bench serve`, run as their commands with the same load, and their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .harness import BenchmarkError
from .serve_load_client import FIRST, GAP, MEAN, PER_TOKEN, PERCENTILES, TOKENS, Load

VLLM_BENCH_SERVE = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""`vllm bench serve` without the other commands of `vllm`, which import what only its server needs."""

TIMEOUT = 600.0
"""Seconds after which a client is ended."""


@dataclass(frozen=True)
class Target:
    """A served model: the server's address, the model's name, and the folder of its tokenizer."""

    url: str
    model: str
    folder: Path


@dataclass(frozen=True)
class Peer:
    """A client of another project.

    Attributes:
        name: Its name in tables.
        package: The package that it is in.
        arguments: Returns its command line after the interpreter. It finds the load in a folder, and writes its report
            to `report.json` there.
        figures: Returns the figures of that report, as those of our own client.
    """

    name: str
    package: str
    arguments: Callable[[Target, Load, Path], list[str]]
    figures: Callable[[dict[str, Any]], dict[str, float]]

    def measure(self, python: str, target: Target, load: Load) -> dict[str, float]:
        """Run the client with an interpreter that has its package, and return its figures.

        Raises:
            BenchmarkError: It failed; the message ends with its last line.
        """
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            write_load(load, folder)
            command = [python, *self.arguments(target, load, folder)]
            ended = subprocess.run(
                command,
                env=_environment(load),
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                cwd=folder,
                check=False,
            )
            report = folder / "report.json"
            if ended.returncode or not report.exists():
                *_, last = ["no output", *(ended.stderr or ended.stdout).strip().splitlines()]
                raise BenchmarkError(f"{self.name} failed (exit {ended.returncode}): {last}")
            return self.figures(json.loads(report.read_text()))


def write_load(load: Load, folder: Path) -> None:
    """Write the prompts to `prompts.jsonl`, and their lengths and arrivals to `trace.jsonl`."""
    prompts = [{"prompt": prompt} for prompt in load.prompts]
    trace = [
        {"timestamp": arrives, "input_length": length, "output_length": load.tokens}
        for arrives, length in zip(load.arrivals, load.prompt_tokens, strict=True)
    ]
    for name, rows in (("prompts", prompts), ("trace", trace)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def interpreter(package: str, given: str | None) -> str | None:
    """Return the interpreter that a client runs with: the given one, else this one if it has the package."""
    return given or (sys.executable if find_spec(package) is not None else None)


def version(python: str, package: str) -> str:
    """Return the version of a package of another interpreter.

    Raises:
        BenchmarkError: It does not have the package, or cannot be run.
    """
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    try:
        ended = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BenchmarkError(f"{python} cannot be run: {error.strerror}") from error
    if ended.returncode:
        raise BenchmarkError(f"{python} does not have the package {package}")
    return ended.stdout.strip()


def _environment(load: Load) -> dict[str, str]:
    """An environment without the network, and in which guidellm leaves the server its core.

    By default it has ten processes and ten thousand waiting tasks.
    """
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",
        "GUIDELLM__MAX_CONCURRENCY": str(len(load.prompts)),
    }


def _guidellm_arguments(target: Target, load: Load, folder: Path) -> list[str]:
    # Poisson arrivals of its own would differ; prompts are its own, of the same lengths.
    options = {
        "backend": f"kind=openai_http,target={target.url},model={target.model},request_format=/v1/completions",
        "profile": "kind=replay",
        "tokenizer": f"kind=hf_auto,model={target.folder}",
        "data": f"kind=trace_synthetic,source.kind=json_file,source.path={folder / 'trace.jsonl'}",
        "output": f"kind=json,path={folder / 'report.json'}",
    }
    return [
        "-m",
        "guidellm",
        "run",
        *(part for name, value in options.items() for part in (f"--{name}", value)),
        "--disable-console",
    ]


def _guidellm_figures(report: dict[str, Any]) -> dict[str, float]:
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    first = metrics["time_to_first_token_ms"]["successful"]
    found = {MEAN: first["mean"] / 1e3, TOKENS: metrics["output_tokens_per_second"]["successful"]["mean"]}
    # Its "inter token latency" is an average for each request: the time per output token of others.
    for name, summary in ((FIRST, first), (PER_TOKEN, metrics["inter_token_latency_ms"]["successful"])):
        found |= {f"{name} p{p}": summary["percentiles"][f"p{p}"] / 1e3 for p in PERCENTILES}
    return found


def _vllm_arguments(target: Target, load: Load, folder: Path) -> list[str]:
    options = {
        "base-url": target.url,
        "model": str(target.folder),
        "served-model-name": target.model,
        "dataset-name": "custom",
        "dataset-path": str(folder / "prompts.jsonl"),
        "custom-output-len": load.tokens,
        "num-prompts": len(load.prompts),
        "request-rate": load.per_second,
        "seed": load.seed,
        "ready-check-timeout-sec": 0,
        "metric-percentiles": ",".join(map(str, PERCENTILES)),
        "result-dir": str(folder),
        "result-filename": "report.json",
    }
    flags = ["skip-chat-template", "disable-shuffle", "ignore-eos", "disable-tqdm", "save-result"]
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return ["-c", VLLM_BENCH_SERVE, *given, *(f"--{flag}" for flag in flags)]


def _vllm_figures(report: dict[str, Any]) -> dict[str, float]:
    found = {MEAN: report["mean_ttft_ms"] / 1e3, TOKENS: report["output_throughput"]}
    for name, key in ((FIRST, "ttft"), (PER_TOKEN, "tpot"), (GAP, "itl")):
        found |= {f"{name} p{p}": report[f"p{p}_{key}_ms"] / 1e3 for p in PERCENTILES}
    return found


GUIDELLM = Peer("guidellm", "guidellm", _guidellm_arguments, _guidellm_figures)
VLLM = Peer("vllm bench serve", "vllm", _vllm_arguments, _vllm_figures)
