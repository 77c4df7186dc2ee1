"""How fast do other libraries' own functions load and decode with bigmodel in accelerate's place?

transformers loads a checkpoint with `device_map`, all layers on disk, and decodes: once with accelerate, once with
bigmodel standing in for it (`bigmodel.compat.install`), in a process of its own each. Steps are measured twice: with
the files in the page cache, beside the model in memory, which on a CPU no step can be faster than; and with the files
evicted before each step, as on a machine whose memory the weights exceed: there each step reads them from disk. So are
the imports measured, from the start of an interpreter until a class of transformers is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from .harness import Column, Limit, Report, Samples, Table, Variant, comparison_table, measure
from .harness.devices import first_device
from .harness.errors import BenchmarkError
from .harness.isolate import environment_of_children
from .harness.report import Cell

OURS, ACCELERATE, RESIDENT = "bigmodel", "accelerate", "the model in memory"
FASTER = 3.0
NO_SLOWER = 1.0
TOKENS = 8
CACHED, EVICTED = "cached", "evicted"
"""State of the files before each step: in the page cache, or on disk alone."""

DEVICES = ("cpu", "cuda")
"""Devices that this benchmark supports."""
ONLY = "accelerate knows no others"
"""Why it supports no others."""

BEGIN = {OURS: "import bigmodel.compat as compat; compat.install(); ", ACCELERATE: "import accelerate; ", RESIDENT: ""}
"""Begin of the programs that are run with each."""

IMPORT = "import transformers; transformers.LlamaForCausalLM"
DECODE = f"import json, sys; from {__name__} import load_and_decode; load_and_decode(**json.loads(sys.argv[1]))"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("model", nargs="?", default=None, help="llama-1b, or a folder (default: llama-1b)")
    parser.add_argument("--steps", type=int, default=4, help="decode steps behind each value")
    parser.add_argument("--files", choices=(CACHED, EVICTED), help="measure steps with the files there alone")


def run(options: argparse.Namespace) -> Report:
    """Measure imports, loading and decode steps, and check that both give the same tokens."""
    from . import models
    from .checkpoints import checkpoint
    from .harness.pagecache import evict, warm

    folder = checkpoint(options.model or ("tiny" if options.quick else "llama-1b"), options.workdir)
    shards = sorted(folder.glob("*.safetensors"))
    evict(shards)
    device = first_device(options.device)
    device_map = models.layer_map(folder, layers="disk", rest="cpu" if device == "cpu" else 0)
    tokens: dict[str, list[int]] = {}
    decoding: dict[str, Samples] = {}
    with tempfile.TemporaryDirectory(dir=options.workdir) as scratch:
        for state in (CACHED, EVICTED) if options.files is None else (options.files,):
            call = {"folder": str(folder), "device": device, "evicted": state == EVICTED, "steps": options.steps}
            variants = [
                Variant(
                    name, partial(_decode, name, tokens, {**call, "device_map": given}, scratch), partial(warm, shards)
                )
                for name, given in ((OURS, device_map), (ACCELERATE, device_map), (RESIDENT, None))
                if state == CACHED or given is not None
            ]
            decoding[state] = measure(variants, options.rounds, warmup=0, seed=options.seed)
    importing = measure(
        [Variant(name, partial(_import_seconds, BEGIN[name] + IMPORT)) for name in (OURS, ACCELERATE)],
        options.rounds,
        warmup=0 if options.quick else 1,
        seed=options.seed,
    )
    return _report(options, folder, decoding, importing, tokens[OURS] == tokens[ACCELERATE])


def _decode(name: str, tokens: dict[str, list[int]], call: dict[str, Any], scratch: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=scratch) as offload:
        answer = Path(offload) / "answer.json"
        given = {**call, "offload": offload, "answer": str(answer)}
        _run(BEGIN[name] + DECODE, json.dumps(given))
        found: dict[str, Any] = json.loads(answer.read_text())
    tokens[name] = found.pop("tokens")
    return found


def load_and_decode(
    folder: str,
    device_map: dict[str, int | str] | None,
    device: str,
    evicted: bool,
    offload: str,
    answer: str,
    steps: int,
) -> None:
    """Load a checkpoint through transformers and decode; write the seconds of a step and of the load, and the first
    tokens, to the file `answer`. Called in a fresh process.

    Args:
        device_map: Of transformers' loader; None: all weights are copied to `device`.
        device: Device of the inputs.
        evicted: Evict the files from the page cache before each step; the time of that is not counted.
    """
    from . import models
    from .harness.pagecache import evict
    from .steps import Decoder

    models.warm_up(device=device)
    begun = time.perf_counter()
    if device_map is None:
        model = models.resident(Path(folder), device)
    else:
        model = models.accelerate_indexed(Path(folder), device_map, Path(offload))
    loaded = time.perf_counter() - begun
    decoder = Decoder(model, device)
    tokens = decoder.logits(TOKENS).argmax(-1).flatten().tolist()
    if evicted:
        shards = sorted(Path(folder).glob("*.safetensors"))
        seconds = decoder.seconds_per_step(steps, before=lambda: evict(shards))
    else:
        seconds = decoder.seconds_per_step(steps)
    Path(answer).write_text(json.dumps({"seconds": seconds, "load": loaded, "tokens": tokens}))


def _import_seconds(program: str) -> float:
    """Return the seconds of an interpreter that runs `program`, and nothing else."""
    begun = time.perf_counter()
    _run(program)
    return time.perf_counter() - begun


def _run(program: str, *arguments: str) -> None:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment_of_children(), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise BenchmarkError(f"a program failed (exit {done.returncode}): {last}") from RuntimeError(done.stderr)


def _report(
    options: argparse.Namespace, folder: Path, decoding: dict[str, Samples], importing: Samples, same_tokens: bool
) -> Report:
    name = folder.name.rpartition("-")[0]
    where = {CACHED: "files in the page cache", EVICTED: "files read from disk in each step"}
    loading = next(iter(decoding.values()))
    rows: list[list[Cell]] = [[each, loading.median(each, "load")] for each in loading.values]
    return Report(
        "stand_in",
        options.device,
        settings={"model": folder.name, "steps": options.steps},
        tables=[
            *(
                comparison_table(
                    f"A decode step of {name} as transformers loads it, layers on disk, {where[state]}",
                    samples,
                    ACCELERATE,
                )
                for state, samples in decoding.items()
            ),
            Table("Loading it", [Column("variant"), Column("load", "seconds")], rows),
            comparison_table("An interpreter that imports transformers", importing, ACCELERATE),
        ],
        limits=[
            *(
                Limit(
                    f"a decode step, {where[state]}, times faster than with accelerate",
                    1 / samples.ratio(OURS, ACCELERATE).median,
                    ">=",
                    FASTER,
                )
                for state, samples in decoding.items()
            ),
            Limit("importing, over accelerate", importing.ratio(OURS, ACCELERATE).median, "<=", NO_SLOWER),
            Limit("both give the same tokens", float(same_tokens), "==", 1, "count"),
        ],
        notes=["logits may differ in the last bit: accelerate copies weights to other addresses than the file has"],
        samples={**{f"decoding, {state}": samples for state, samples in decoding.items()}, "importing": importing},
    )
