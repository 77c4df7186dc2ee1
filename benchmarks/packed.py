"""How much sooner does a step end when the weights that cross the link are quantised as published?

Layers of a model in bfloat16 and of the same model quantised by `bigmodel quantize` lie in host memory and are streamed
over a virtual link. The bound of a step is the link's time for the stored bytes; restoring should hide behind it.

Of a mixture only the chosen experts cross the link, through a cache of the same bytes for both, and a step waits for
them. Tokens are drawn at random, the same for both.

The virtual accelerator restores and computes on the host's processor, many times slower than an accelerator does. So
links are slow enough that transfers take longer than restoring and computing, of all layers of each format, and of the
mixture in bfloat16. The seconds of the link, of computing alone, and of the step, are apart.

Last, the resident set of a process that loads and runs a larger model on the host is compared with its plan: the file,
and what a layer is restored in. Code that a process reads when it first runs a kernel is in memory before: a tiny model
of the same format has run. What malloc keeps of freed memory is apart, as it is for `bigmodel verify`; malloc returns
it from the start, as gaps that it kept would count when they are used again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Samples, Table, Variant, elapsed, measure, run_isolated
from .harness.measure import SECONDS
from .harness.report import Cell

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bigmodel.plan import Plan

    from .steps import Decoder

WHOLE = "bfloat16"
SHARES = {"fp8": 0.54, "int4": 0.30, "mxfp4": 0.28}
"""Largest share of the link's time for bfloat16, by what the model is quantised to."""

STEP, RSS = 1.05, 1.02
MIXTURE, FASTER, MORE_EXPERTS = "mxfp4", 3.4, 3.5
MOVED = "bytes"
"""Name of the bytes that a step of a mixture moves over the link."""

CACHE_SHARE = 0.25
"""Bytes of the experts' cache, as a share of the mixture's experts in bfloat16."""

DEVICES = ("virtual",)
"""Devices that this benchmark supports."""

ONLY = "its marks are for one set speed of the link; `quantized` measures links of accelerators"
"""Why it supports no others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--link", type=float, default=0.03, help="GB/s of the virtual link")
    parser.add_argument("--experts-link", type=float, default=0.003, help="GB/s of the virtual link of the mixture")
    parser.add_argument("--steps", type=int, default=3, help="decode steps behind each value")
    parser.set_defaults(device="virtual")


def run(options: argparse.Namespace) -> Report:
    """Measure streamed steps, steps of a mixture, and the resident set, of each format beside bfloat16."""
    import torch

    from bigmodel.devices import virtual

    torch.set_num_threads(options.threads or 1)
    dense = quantised("tiny-half" if options.quick else "llama-half", list(SHARES), options.workdir)
    mixture = quantised("tiny-mixtral-half" if options.quick else "mixtral-small-half", [MIXTURE], options.workdir)
    rate = options.link * 1e9
    virtual.enable(count=1)
    streamed, computed, moved = _streamed(dense, options, rate)
    experts_rate = options.experts_link * 1e9
    experts = _mixture(mixture, options, experts_rate)
    virtual.disable()
    tiny = quantised("tiny-half", list(SHARES), options.workdir)
    large = dense if options.quick else quantised("llama-400m", list(SHARES), options.workdir)
    grown = {
        name: [
            run_isolated(grown_by, folder=str(folder), tiny=str(tiny[name]), keeps_freed=kept) for kept in (False, True)
        ]
        for name, folder in large.items()
    }
    rows = [_row(name, streamed, computed, moved, rate) for name in dense]
    columns = [Column("weights"), Column("bytes moved", "bytes"), Column("share of bfloat16", "ratio")]
    columns += [Column("link", "seconds"), Column("compute", "seconds"), Column("step", "seconds")]
    columns.append(Column("step over its transfer", "ratio"))
    of_experts = [Column("experts"), Column("experts in the cache", "count"), Column("bytes moved", "bytes")]
    of_experts += [Column("link", "seconds"), Column("compute", "seconds"), Column("step", "seconds")]
    of_experts += [Column("step over link and compute", "ratio"), Column("bfloat16 over this", "ratio")]
    memory = [Column("weights"), Column("file", "bytes"), Column("planned", "bytes"), Column("resident set", "bytes")]
    memory.append(Column("resident set with freed memory that malloc keeps", "bytes"))
    return Report(
        "packed",
        options.device,
        settings={
            "link": rate,
            "link of the mixture": experts_rate,
            "steps": options.steps,
            "threads": torch.get_num_threads(),
        },
        tables=[
            Table("A step with all layers streamed", columns, rows),
            Table(
                "A step of a mixture, with caches of the same bytes",
                of_experts,
                [experts.row(name, experts_rate) for name in mixture],
            ),
            Table(
                "Loading and running on the host",
                memory,
                [[name, *found[0], found[1][-1]] for name, found in grown.items()],
            ),
        ],
        limits=limits(
            rows,
            experts.steps.ratio(WHOLE, MIXTURE).median,
            experts.capacities,
            {name: found[0][1:] for name, found in grown.items()},
        ),
        samples={
            "streamed": streamed,
            "streamed, link of no time": computed,
            "experts": experts.steps,
            "experts, link of no time": experts.computed,
        },
    )


def limits(
    rows: Sequence[Sequence[Any]], faster: float, capacities: dict[str, int], grown: dict[str, list[int]]
) -> list[Limit]:
    """Return the limits on the rows of the first table, on the mixture, and on the resident set."""
    found = [
        Limit(f"{row[0]}: bytes over those of bfloat16", row[2], "<=", SHARES[row[0]])
        for row in rows
        if row[0] in SHARES
    ]
    found += [Limit(f"{row[0]}: step over its transfer", row[-1], "<=", STEP) for row in rows]
    found.append(Limit("mixture: step of bfloat16 over that of mxfp4", faster, ">=", FASTER))
    more = capacities[MIXTURE] / max(capacities[WHOLE], 1)
    found.append(Limit("mixture: experts of mxfp4 in the cache over those of bfloat16", more, ">=", MORE_EXPERTS))
    for name, (planned, measured) in grown.items():
        found.append(Limit(f"{name}: resident set over its plan", measured / planned, "<=", RSS))
    return found


@dataclass(frozen=True)
class Mixture:
    """Decoding with a mixture, by weights.

    Attributes:
        steps: seconds of a step, and the bytes that it moved over the link.
        computed: seconds of the same step over a link that takes no time: to compute, restore, and look up experts.
        capacities: experts that the cache holds.
    """

    steps: Samples
    computed: Samples
    capacities: dict[str, int]

    def row(self, name: str, rate: float) -> list[Cell]:
        """Return the row of one kind of weights, over a link of `rate` bytes per second."""
        computed, step = self.computed.median(name), self.steps.median(name)
        moved = self.steps.median(name, MOVED)
        values = zip(self.steps.of(name), self.steps.of(name, MOVED))
        both = statistics.median(seconds / (nbytes / rate + computed) for seconds, nbytes in values)
        over = self.steps.ratio(WHOLE, name).median
        return [name, self.capacities[name], moved, moved / rate, computed, step, both, over]


def quantised(name: str, targets: Sequence[str], workdir: Path) -> dict[str, Path]:
    """Return the folders of a checkpoint and of its quantised selves, after writing those that do not exist."""
    from bigmodel.checkpoint.quantize import quantize_checkpoint

    from .checkpoints import checkpoint

    found = {WHOLE: checkpoint(name, workdir)}
    for target in targets:
        folder = workdir / f"{found[WHOLE].name}-{target}"
        if not folder.exists():
            quantize_checkpoint(str(found[WHOLE]), folder, target, 32 if target == "int4" else None)
        found[target] = folder
    return found


def _streamed(
    folders: dict[str, Path], options: argparse.Namespace, rate: float
) -> tuple[Samples, Samples, dict[str, int]]:
    """Return samples of a step with all layers streamed from host memory over a link of `rate` bytes per second, and
    over one that takes no time; and the bytes that a step moves."""
    from bigmodel.devices import virtual

    from .steps import Decoder

    models = {name: offloaded(folder) for name, folder in folders.items()}
    decoders = {name: Decoder(model, "virtual:0") for name, model in models.items()}
    variants = [Variant(name, partial(_seconds, decoder, options.steps)) for name, decoder in decoders.items()]
    moved = {name: bytes_moved(models[name], decoder) for name, decoder in decoders.items()}
    computed = measure(variants, options.rounds, seed=options.seed)
    virtual.enable(count=1, bandwidth=rate)
    return measure(variants, options.rounds, seed=options.seed), computed, moved


def _mixture(folders: dict[str, Path], options: argparse.Namespace, rate: float) -> Mixture:
    """Return what decoding with chosen experts takes that are fetched into a cache.

    Args:
        folders: the mixture, and its quantised self.
        options: of the command.
        rate: bytes per second of the link.
    """
    from bigmodel.devices import virtual
    from bigmodel.profile import profile_source

    from .steps import Decoder

    profiles = {name: profile_source(folder, context_length=0) for name, folder in folders.items()}
    cache = int(CACHE_SHARE * sum(unit.expert_weights for unit in profiles[WHOLE].units))
    slot = {
        name: next(unit.experts[0].nbytes for unit in found.units if unit.experts) for name, found in profiles.items()
    }
    decoders = {name: Decoder(offloaded(folder, expert_cache=cache), "virtual:0") for name, folder in folders.items()}
    texts = {name: Text(decoder, options.seed) for name, decoder in decoders.items()}
    variants = [Variant(name, partial(text.mean_step, options.steps)) for name, text in texts.items()]
    virtual.enable(count=1)
    computed = measure(variants, options.rounds, seed=options.seed)
    virtual.enable(count=1, bandwidth=rate)
    steps = measure(variants, options.rounds, seed=options.seed)
    return Mixture(steps, computed, {name: cache // nbytes for name, nbytes in slot.items()})


class Text:
    """Steps of one long text of tokens that are drawn at random: routers then choose other experts for each.

    Args:
        decoder: the model; it runs its prompt.
        seed: of the tokens.
    """

    def __init__(self, decoder: Decoder, seed: int) -> None:
        import torch

        self._decoder = decoder
        self._vocabulary = int(decoder.start().shape[-1])
        self._drawn = torch.Generator().manual_seed(seed)

    def mean_step(self, steps: int) -> dict[str, float]:
        """Return the mean seconds of the next steps, and the mean bytes that they move over the link."""
        from bigmodel.devices import virtual

        before = virtual.link(0).bytes_to_device
        seconds = elapsed(lambda: [self._step() for _ in range(steps)], self._decoder.device) / steps
        return {SECONDS: seconds, MOVED: (virtual.link(0).bytes_to_device - before) / steps}

    def _step(self) -> torch.Tensor:
        import torch

        token = torch.randint(self._vocabulary, (1, 1), generator=self._drawn).to(self._decoder.device)
        return self._decoder.feed(token)


def _seconds(decoder: Any, steps: int) -> float:
    seconds: float = decoder.seconds_per_step(steps)
    return seconds


def offloaded(folder: Path, **how: Any) -> nn.Module:
    """Return the model with its layers in host memory and the rest on the accelerator."""
    import json

    from bigmodel.dispatch import from_pretrained

    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    ends: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), 0)
    return from_pretrained(folder, {**ends, **{f"model.layers.{n}": "cpu" for n in range(layers)}}, **how)


def bytes_moved(model: Any, decoder: Any) -> int:
    """Return the bytes that cross the link in a step."""
    decoder.start()
    decoder.step()
    before = sum(device["bytes_from_ram"] for device in model.dispatch_stats().values())
    decoder.step()
    after: int = sum(device["bytes_from_ram"] for device in model.dispatch_stats().values())
    return after - before


def _row(name: str, samples: Samples, computed: Samples, moved: dict[str, int], rate: float) -> list[Cell]:
    step, link = samples.median(name), moved[name] / rate
    return [name, moved[name], moved[name] / moved[WHOLE], link, computed.median(name), step, step / link]


def grown_by(folder: str, tiny: str, keeps_freed: bool) -> list[int]:
    """Return the bytes of a model's file, those of its plan, and those by which the resident set grows as it is loaded
    and run. Called in a fresh process.

    Args:
        folder: the model.
        tiny: a small model of the same format, which runs before.
        keeps_freed: malloc keeps freed memory resident, as it does by default.
    """
    from bigmodel.devices import HOST, max_memory_allocated, memory_allocated, reset_peak_memory
    from bigmodel.verify.peak_rss import return_freed_memory_at_once

    if not keeps_freed:
        return_freed_memory_at_once()
    _loaded_and_run(tiny)
    reset_peak_memory(HOST)
    before = memory_allocated(HOST)
    plan = _loaded_and_run(folder)
    grown = max_memory_allocated(HOST) - before
    return [sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")), plan.devices[HOST].total, grown]


def _loaded_and_run(folder: str) -> Plan:
    """Load a model to the host, run a prompt, and return its plan."""
    from bigmodel.dispatch import from_pretrained, get_plan

    from .steps import Decoder

    model = from_pretrained(folder, max_memory={"cpu": "64GB"}, context_length=32)
    Decoder(model).start()
    plan = get_plan(model)
    assert plan is not None
    return plan
