"""How long does a plan of a very large model take, and how much memory: from headers, and from a model on meta?

Every plan is the first in a separate process, after the imports. The checkpoint consists of headers with the real
shapes, sharded as in published models, and sparse files without data. Two of them are published quantised, with two or
three tensors for each matrix of an expert: their headers have up to 200,000 entries.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigmodel.atomic_files import write_text

from .harness import Column, Limit, Report, Table, run_isolated
from .harness.report import Cell

SECONDS, BYTES = 1.0, 10**9
SHARD = 5 * 10**9
HEADERS, META = "headers", "meta"

Entry = tuple[str, str, list[int]]
"""Name, dtype of safetensors, and shape of one stored tensor."""

FP8_BLOCK, INT4_GROUP = 128, 32


def _fp8(name: str, shape: list[int]) -> list[Entry]:
    """Return the tensors of a matrix in fp8 blocks, as DeepSeek-V3 is published."""
    blocks = [math.ceil(size / FP8_BLOCK) for size in shape]
    return [(name, "F8_E4M3", shape), (f"{name}_scale_inv", "F32", blocks)]


def _int4(name: str, shape: list[int]) -> list[Entry]:
    """Return the tensors of an expert's matrix in int4, as Kimi K2 is published; other matrices are whole."""
    if ".experts." not in name:
        return [(name, "BF16", shape)]
    return [
        (f"{name}_packed", "I32", [shape[0], shape[1] // 8]),
        (f"{name}_scale", "BF16", [shape[0], shape[1] // INT4_GROUP]),
        (f"{name}_shape", "I32", [2]),
    ]


@dataclass(frozen=True)
class Architecture:
    """A model by its class of transformers and its sizes, and how it is published.

    Attributes:
        name: class of transformers.
        sizes: settings of its config; what is left out is as the config's class has it.
        quantization: the ``quantization_config``; None: it is published whole.
        stored: returns the stored tensors of a quantised matrix.
    """

    name: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None
    stored: Callable[[str, list[int]], list[Entry]] | None = None


_LLAMA_405B = {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
_KIMI_K2 = {
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "vocab_size": 163840,
}  # fmt: skip
_INT4_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": INT4_GROUP}

ARCHITECTURES: dict[str, Architecture] = {
    "405B dense": Architecture("LlamaForCausalLM", _LLAMA_405B),
    "671B mixture": Architecture("DeepseekV3ForCausalLM"),
    "671B mixture, fp8": Architecture(
        "DeepseekV3ForCausalLM", {}, {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}, _fp8
    ),
    "1T mixture, int4": Architecture(
        "DeepseekV3ForCausalLM",
        _KIMI_K2,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4_WEIGHTS}},
        },
        _int4,
    ),
}
"""Llama 3.1 405B by its sizes; DeepSeek-V3, whose sizes are what its config says when nothing is given; Kimi K2."""

QUICK: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip

MACHINES = {"one accelerator": 1, "eight accelerators": 8}
"""Numbers of accelerators of 80 GB, with a host of 2 TB."""

DEVICES = ("cpu",)
"""Devices that this benchmark supports."""
ONLY = "it plans from headers and runs nothing"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--architectures",
        default=None,
        help=f"some of {'; '.join(ARCHITECTURES)}, separated by semicolons (default: all)",
    )


def run(options: argparse.Namespace) -> Report:
    """Plan each architecture for each machine, from headers and from meta, in as many processes as there are rounds."""
    rows: list[list[Cell]] = []
    wanted = options.architectures.split(";") if options.architectures else list(ARCHITECTURES)
    for name in wanted:
        folder = make(name, options.workdir, options.quick)
        for source in (HEADERS, META) if ARCHITECTURES[name].quantization is None else (HEADERS,):
            for machine, count in MACHINES.items():
                found = [
                    run_isolated(planned, folder=str(folder), source=source, accelerators=count)
                    for _ in range(options.rounds)
                ]
                seconds = sorted(one["seconds"] for one in found)
                grown = max(one["grown"] for one in found)
                rows.append([name, source, machine, statistics.median(seconds), seconds[-1], grown, found[0]["parts"]])
    return report(options, rows)


def report(options: argparse.Namespace, rows: list[list[Cell]]) -> Report:
    """Return the table, and the limits on the slowest first call and the most memory."""
    columns = [Column("architecture"), Column("from"), Column("planned for")]
    columns += [Column("median", "seconds"), Column("slowest", "seconds")]
    columns += [Column("memory taken", "bytes"), Column("parts", "count")]
    slowest, most = (max(float(row[at] or 0) for row in rows) for at in (4, 5))
    return Report(
        "plan_large",
        options.device,
        tables=[Table("The first plan of a process", columns, rows)],
        limits=[
            Limit("slowest first plan", slowest, "<=", SECONDS, "seconds"),
            Limit("most memory that a plan took", most, "<=", BYTES, "bytes"),
        ],
    )


def make(name: str, workdir: Path, quick: bool) -> Path:
    """Return the folder of a checkpoint of an architecture with headers only, after writing it if it does not exist."""
    import torch
    import transformers

    folder = workdir / f"plan-large-{name.replace(',', '').replace(' ', '-')}{'-quick' if quick else ''}"
    if (folder / "config.json").exists():
        return folder
    architecture = ARCHITECTURES[name]
    model_class: Any = getattr(transformers, architecture.name)
    config = model_class.config_class(**{**architecture.sizes, **(QUICK if quick else {})})
    config.architectures, config.dtype = [architecture.name], torch.bfloat16
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    shards = list(_shards(model, architecture))
    for number, entries in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_headers(folder / file, entries)
        files.update(dict.fromkeys((key for key, _, _ in entries), file))
    write_text(folder / "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": files}))
    if architecture.quantization is not None:
        config.quantization_config = dict(architecture.quantization)
    config.save_pretrained(folder)
    return folder


def _shards(model: Any, architecture: Architecture) -> Iterator[list[Entry]]:
    """Yield the stored tensors, shard by shard, in the published layout: experts one by one."""
    entries: list[Entry] = []
    size = 0
    for name, shape in _published(model):
        for entry in _stored(architecture, name, shape):
            if entries and size + _nbytes(entry) > SHARD:
                yield entries
                entries, size = [], 0
            entries.append(entry)
            size += _nbytes(entry)
    yield entries


def _stored(architecture: Architecture, name: str, shape: list[int]) -> list[Entry]:
    """Return the stored tensors of one tensor of the model: matrices of layers may be quantised, but no router."""
    is_matrix = len(shape) == 2 and name.startswith("model.layers.") and not name.endswith(".gate.weight")
    if architecture.stored is None or not is_matrix:
        return [(name, "BF16", shape)]
    return architecture.stored(name, shape)


def _published(model: Any) -> Iterator[tuple[str, list[int]]]:
    for name, tensor in model.state_dict().items():
        shape = list(tensor.shape)
        module, _, last = name.rpartition(".")
        if len(shape) != 3:
            yield name, shape
        elif last == "gate_up_proj":
            for expert in range(shape[0]):
                for part in ("gate_proj", "up_proj"):
                    yield f"{module}.{expert}.{part}.weight", [shape[1] // 2, shape[2]]
        else:
            for expert in range(shape[0]):
                yield f"{module}.{expert}.{last}.weight", shape[1:]


_ITEMSIZE = {"F8_E4M3": 1, "BF16": 2, "F32": 4, "I32": 4}


def _nbytes(entry: Entry) -> int:
    return _ITEMSIZE[entry[1]] * math.prod(entry[2])


def write_headers(path: Path, entries: list[Entry]) -> None:
    """Write a sparse safetensors file without data, which takes almost no space on disk."""
    described, offset = {}, 0
    for entry in entries:
        name, dtype, shape = entry
        end = offset + _nbytes(entry)
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + offset)


def planned(folder: str, source: str, accelerators: int) -> dict[str, float]:
    """Plan once, in a fresh process; return its seconds, peak bytes, and the number of parts of its device map."""
    import transformers

    from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
    from bigmodel.plan import plan
    from bigmodel.profile.machine.machine import nominal_machine
    from bigmodel.profile.source import meta_model
    from bigmodel.sources.resolve import open_source

    architecture = json.loads(Path(folder, "config.json").read_text())["architectures"][0]
    getattr(transformers, architecture)  # transformers imports the modules of its models on first use
    model: Any = folder if source == HEADERS else meta_model(open_source(folder))
    budgets: dict[Any, str] = {**dict.fromkeys(range(accelerators), "80GB"), "cpu": "2TB"}
    reset_peak_memory("cpu")
    before, started = memory_allocated("cpu"), time.perf_counter()
    found = plan(model, budgets, context_length=4096, machine=nominal_machine())
    seconds = time.perf_counter() - started
    parts = len(found.device_map)
    return {"seconds": seconds, "grown": max_memory_allocated("cpu") - before, "parts": parts}
