"""How fast do other libraries' own functions load and decode with bigmodel in accelerate's place?

transformers loads a checkpoint with `device_map`, all layers on disk, and decodes: once with accelerate, once with
bigmodel standing in for it (`bigmodel.compat.install`), in a process of its own each. Steps are measured twice: in
memory that the weights exceed (a control group limits it), where each step reads from disk what does not stay in the
page cache; and with all files in the page cache, beside the model in memory, which on a CPU no step can be faster than.
So are the imports measured, from the start of an interpreter until a class of transformers is there.
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
from .harness.memory_group import INTERPRETER_BYTES, memory_group
from .harness.report import Cell

OURS, ACCELERATE, RESIDENT = "bigmodel", "accelerate", "the model in memory"
FASTER = 3.0
NO_SLOWER = 1.0
TOKENS = 8
UNMEASURED = 2
"""Passes of a decoder before the steps that it measures: the prompt and one step."""

CACHED, LIMITED = "cached", "limited"
"""Where the files are: in the page cache; or part of them, as much as limited memory allows."""

DEVICES = ("cpu", "cuda")
"""Devices that this benchmark supports."""
ONLY = "accelerate knows no others"
"""Why it supports no others."""

BEGIN = {OURS: "import bigmodel.compat as compat; compat.install(); ", ACCELERATE: "import accelerate; ", RESIDENT: ""}
"""Begin of the programs that are run with each."""

_CLASS = "import transformers; transformers.LlamaForCausalLM"
IMPORT = {OURS: BEGIN[OURS] + _CLASS, ACCELERATE: _CLASS}
"""The same program with each: transformers imports accelerate itself."""

JOIN = "import os, sys; open(sys.argv[2], 'w').write(str(os.getpid())); "
"""Begin of the programs that join a control group, before they import anything that takes memory."""

DECODE = f"import json, sys; from {__name__} import load_and_decode; load_and_decode(**json.loads(sys.argv[1]))"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("model", nargs="?", default=None, help="llama-1b, or a folder (default: llama-1b)")
    parser.add_argument("--steps", type=int, default=4, help="decode steps behind each value")
    parser.add_argument("--files", choices=(LIMITED, CACHED), help="measure steps with the files there alone")
    parser.add_argument(
        "--memory", type=float, default=0.75, help="limited memory, as a share of the weights (default: 0.75)"
    )


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
        for state in (LIMITED, CACHED) if options.files is None else (options.files,):
            call = {"folder": str(folder), "device": device, "steps": options.steps}
            # Pages that other processes have read into the cache would not count as the limited process's.
            memory, before = (None, warm) if state == CACHED else (_limit(options.memory, shards), evict)
            variants = [
                Variant(
                    name,
                    partial(_decode, name, tokens, {**call, "device_map": given}, scratch, memory),
                    partial(before, shards),
                )
                for name, given in ((OURS, device_map), (ACCELERATE, device_map), (RESIDENT, None))
                if state == CACHED or given is not None
            ]
            decoding[state] = measure(variants, options.rounds, warmup=0, seed=options.seed)
    importing = measure(
        [Variant(name, partial(_import_seconds, program)) for name, program in IMPORT.items()],
        options.rounds,
        warmup=0 if options.quick else 1,
        seed=options.seed,
    )
    return _report(options, folder, decoding, importing, tokens[OURS] == tokens[ACCELERATE])


def _limit(share: float, shards: list[Path]) -> int:
    """Return the bytes of memory of a limited process: a share of the weights, beside the interpreter's own."""
    return INTERPRETER_BYTES + int(share * sum(shard.stat().st_size for shard in shards))


def _decode(
    name: str, tokens: dict[str, list[int]], call: dict[str, Any], scratch: str, memory: int | None
) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=scratch) as offload:
        answer = Path(offload) / "answer.json"
        given = json.dumps({**call, "offload": offload, "answer": str(answer)})
        if memory is None:
            _run(BEGIN[name] + DECODE, given)
        else:
            with memory_group(memory) as group:
                _run(JOIN + BEGIN[name] + DECODE, given, str(group))
        found: dict[str, Any] = json.loads(answer.read_text())
    tokens[name] = found.pop("tokens")
    return found


def load_and_decode(
    folder: str,
    device_map: dict[str, int | str] | None,
    device: str,
    offload: str,
    answer: str,
    steps: int,
) -> None:
    """Load a checkpoint through transformers and decode; write the seconds of a step and of the load, the bytes that a
    step read from disk, and the first tokens, to the file `answer`. Called in a fresh process.

    Args:
        device_map: Of transformers' loader; None: all weights are copied to `device`.
        device: Device of the inputs.
    """
    import psutil

    from . import models
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
    process = psutil.Process()
    read = process.io_counters().read_bytes
    seconds = decoder.seconds_per_step(steps)
    read = process.io_counters().read_bytes - read
    found = {"seconds": seconds, "load": loaded, "read": read / (steps + UNMEASURED), "tokens": tokens}
    Path(answer).write_text(json.dumps(found))


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
    where = {
        CACHED: "files in the page cache",
        LIMITED: f"memory for {options.memory:.0%} of the weights",
    }
    loading = next(iter(decoding.values()))
    rows: list[list[Cell]] = [[each, loading.median(each, "load")] for each in loading.values]
    return Report(
        "stand_in",
        options.device,
        settings={"model": folder.name, "steps": options.steps, "memory": options.memory},
        tables=[
            *(
                comparison_table(
                    f"A decode step of {name} as transformers loads it, layers on disk, {where[state]}",
                    samples,
                    ACCELERATE,
                    extra=[(Column("read from disk", "bytes"), partial(samples.median, figure="read"))],
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
                if state == LIMITED or options.device != "cpu"  # a CPU computes no faster on any files than in memory
            ),
            Limit("importing, over accelerate", importing.ratio(OURS, ACCELERATE).median, "<=", NO_SLOWER),
            Limit("both give the same tokens", float(same_tokens), "==", 1, "count"),
        ],
        notes=["logits may differ in the last bit: accelerate copies weights to other addresses than the file has"],
        samples={**{f"decoding, {state}": samples for state, samples in decoding.items()}, "importing": importing},
    )
