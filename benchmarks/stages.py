"""Do steps of a server and micro-batches in flight through n stages come nearly n times as fast as from one, same bits?

The layers of a model are resident over several accelerators of a set speed, which compute products in proportion to
their rows. Twice as many sequences as there are stages are generated: on one accelerator that holds the whole model; on
all of them, one step at a time; and with as many steps in flight as the plan says. Measured are the seconds of a token
from when all sequences have two until the first one ends. A stage's bubble is the share of all time in which it has
computed nothing, the beginning and the end included.

A forward of a batch is measured in the same way: on one accelerator, whole over all of them, and in the micro-batches
of the plan (`stages_forward`). Stages idle while the first and the last micro-batch pass, so few rows cannot come as
much faster: their bound is a share of the most that micro-batches of whole rows allow. The peer is accelerate's
`prepare_pippy`, whose stages are processes that are held to the same speed (`stages_peer`).
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .harness import BenchmarkError, Column, Limit, Report, Samples, Table, Variant, measure
from .stages_peer import NAME as PEER
from .stages_peer import PACKAGE, stages_of_accelerate

if TYPE_CHECKING:
    from bigmodel.profile.machine.machine import Curve, MachineProfile
    from bigmodel.server.engine.core import EngineCore

    from .stages_forward import Forward

STAGES = (2, 4)
ROWS = (2, 6)
"""Rows of a forward for each stage."""
SHARE = 0.85
"""Least throughput of n stages in units of n times that of one, or of the most that a forward of few rows can have."""
OVER_PEER = 1.02
"""Most seconds of a forward in micro-batches, of accelerate's: the schedules are alike, and two cores compute both."""

DEVICES = ("virtual",)
"""Devices that this benchmark supports."""
ONLY = "it sets the speed of several accelerators, which only virtual ones allow"
"""Why it supports no others."""


@dataclass(frozen=True)
class Sizes:
    """Layers of the model, their widths, FLOP per second of each accelerator, and tokens of each sequence."""

    layers: int
    width: int
    inner: int
    flops: float
    tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--tokens", type=int, default=6, help="tokens of each sequence")
    parser.add_argument("--no-peers", action="store_true", help="leave accelerate out")
    parser.set_defaults(device="virtual", rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Measure one stage, stages in turns and stages at once in the same rounds, and compare their tokens."""
    import torch

    from bigmodel.devices import virtual

    torch.set_num_threads(options.threads or 1)
    from .stages_forward import Forward, widths

    sizes = Sizes(2, 64, 128, 4e7, 4) if options.quick else Sizes(4, 256, 2048, 2.5e7, options.tokens)
    counts, per_stage = (STAGES[:1], ROWS[:1]) if options.quick else (STAGES, ROWS)
    batches = {count: [rows * count for rows in per_stage] for count in counts}
    has_peer = not options.no_peers and importlib.util.find_spec(PACKAGE) is not None
    with ExitStack() as stack:
        model = (sizes.layers, *widths(options.quick), sizes.flops)
        peers = {
            count: stack.enter_context(stages_of_accelerate(count, rows, *model))
            for count, rows in batches.items()
            if has_peer
        }
        virtual.enable(max(counts), flops=sizes.flops)
        stack.callback(virtual.disable)
        found = {count: Measured.of(sizes, count) for count in counts}
        machine = _machine(sizes.flops)
        forwards = [
            Forward(count, rows, sizes.layers, machine, options.quick, peers.get(count))
            for count in counts
            for rows in batches[count]
        ]
        variants = [variant for each in found.values() for variant in each.variants()]
        variants += [variant for each in forwards for variant in each.variants()]
        # All have computed once: the tokens and logits that those measured are compared with.
        samples = measure(variants, options.rounds, warmup=0, seed=options.seed)
    rows = [row for each in found.values() for row in each.rows(samples)]
    columns = [Column("stages", "count"), Column("sequences", "count"), Column("steps"), Column("tokens per second")]
    columns += [Column("of one stage's", "ratio"), Column("worst bubble", "ratio")]
    of_forward = [Column("stages", "count"), Column("rows", "count"), Column("forward"), Column("rows per second")]
    of_forward += [Column("of one stage's", "ratio"), Column("at most", "ratio")]
    return Report(
        "stages",
        options.device,
        settings={**vars(sizes), "threads": torch.get_num_threads()},
        tables=[
            Table(f"{sizes.layers} layers of {sizes.width} x {sizes.inner}, resident", columns, rows),
            Table("a forward of a batch", of_forward, [row for each in forwards for row in each.table(samples)]),
        ],
        limits=[
            *(
                Limit(
                    f"tokens per second of {count} stages, of {count} times one's",
                    each.gain(samples) / count,
                    ">=",
                    SHARE,
                )
                for count, each in found.items()
            ),
            *(each.limit(samples, SHARE) for each in forwards),
            *over_peer(forwards, samples),
            Limit(
                "rows with other logits than in their micro-batch alone",
                float(sum(each.differing for each in forwards)),
                "==",
                0,
                "count",
            ),
            Limit(
                "sequences with other tokens than alone",
                float(sum(each.differing for each in found.values())),
                "==",
                0,
                "count",
            ),
        ],
        notes=[
            "accelerate's stages are processes on the host whose products take as long as the accelerators'; what the "
            "host does to hand a micro-batch on comes on top. Each row is a micro-batch"
            if has_peer
            else f"{PACKAGE} is not installed or was left out: pip install {PACKAGE}"
        ],
        samples={"stages": samples},
    )


def over_peer(forwards: Sequence[Forward], samples: Samples) -> list[Limit]:
    """Return the limit on the seconds of micro-batches over accelerate's, of the worst batch; none without it."""
    found = [ratio for each in forwards if (ratio := each.over_peer(samples)) is not None]
    if not found:
        return []
    return [Limit(f"a forward in micro-batches over {PEER}, at worst", max(found), "<=", OVER_PEER)]


class Measured:
    """The engines that compute the same sequences on one stage and on several.

    Args:
        sizes: Of the model.
        count: Number of stages.
        cores: The engines, by name.

    Attributes:
        differing: Sequences that had other tokens than they have alone.
    """

    def __init__(self, sizes: Sizes, count: int, cores: dict[str, EngineCore]) -> None:
        self.sizes = sizes
        self.count = count
        self.cores = cores
        self.differing = 0
        one = cores["one stage"]
        self._alone = [_generated(one, [prompt], sizes.tokens)[0][0] for prompt in self._prompts]

    @classmethod
    def of(cls, sizes: Sizes, count: int) -> Measured:
        """The engines for so many stages.

        Raises:
            BenchmarkError: The plan has another number of stages, or finds steps in flight not worth it.
        """
        cores = {
            "one stage": _core(sizes, 1, 2 * count, None),
            "in turns": _core(sizes, count, 2 * count, 1),
            "at once": _core(sizes, count, 2 * count, None),
        }
        in_flight = cores["at once"].in_flight
        if in_flight is None or len(set(in_flight.pipeline.devices)) != count or in_flight.steps(2 * count) < count:
            raise BenchmarkError(f"the plan for {count} stages has none in flight for {2 * count} sequences")
        return cls(sizes, count, cores)

    @property
    def _prompts(self) -> list[list[int]]:
        return [[1 + number, 2, 3 + number] for number in range(2 * self.count)]

    def variants(self) -> list[Variant]:
        """What is measured: the seconds of each token of all sequences."""
        return [Variant(self._name(name), partial(self._seconds, name)) for name in self.cores]

    def rows(self, samples: Samples) -> list[list[Any]]:
        """Return a row of the table for each engine."""
        one = samples.median(self._name("one stage"))
        found: list[list[Any]] = []
        for name, core in self.cores.items():
            seconds = samples.median(self._name(name))
            stages = 1 if name == "one stage" else self.count
            bubble = None
            if core.in_flight is not None:
                figures = core.in_flight.pipeline.times.figures().values()
                bubble = max(each["idle_share"] for each in figures)
            found.append([stages, 2 * self.count, name, f"{1 / seconds:.2f}", one / seconds, bubble])
        return found

    def gain(self, samples: Samples) -> float:
        """Return the throughput of the stages at once in units of one stage's."""
        return samples.median(self._name("one stage")) / samples.median(self._name("at once"))

    def _name(self, name: str) -> str:
        return f"{2 * self.count} sequences, {self.count} stages: {name}"

    def _seconds(self, name: str) -> float:
        found, seconds = _generated(self.cores[name], self._prompts, self.sizes.tokens)
        self.differing += sum(one != other for one, other in zip(found, self._alone, strict=True))
        return seconds


def _core(sizes: Sizes, stages: int, sequences: int, steps: int | None) -> EngineCore:
    """Return an engine over a model whose layers are resident on so many accelerators."""
    from transformers import PreTrainedTokenizerFast

    from bigmodel.dispatch import dispatch_model
    from bigmodel.plan import plan
    from bigmodel.server.engine import EngineOptions, build_engine

    model = llama(sizes.layers, sizes.width, sizes.inner)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budgets: dict[Any, int] = {**dict.fromkeys(range(stages), weights + 2**26), "cpu": 2**40}
    made = plan(model, budgets, "balanced", batch_size=sequences, context_length=128, machine=_machine(sizes.flops))
    used = {part.runs_on for part in made.parts}
    if len(used) != stages:
        raise BenchmarkError(f"the plan for {stages} accelerators uses {used}")
    options = EngineOptions(max_sequences=sequences, prefix_cache=False, row_multiple=1, steps_in_flight=steps)
    return build_engine(dispatch_model(model, made), _tokenizer(PreTrainedTokenizerFast), made, options).core


def llama(layers: int, width: int, inner: int) -> Any:
    """Return a Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def _tokenizer(kind: type[Any]) -> Any:
    from tokenizers import Tokenizer, models

    return kind(tokenizer_object=Tokenizer(models.WordLevel({str(number): number for number in range(64)}, "0")))


def _machine(flops: float) -> MachineProfile:
    """Return a machine whose accelerators compute at `flops` beside the host."""
    from bigmodel.profile.machine.machine import DeviceSpeed, nominal_machine

    speed = DeviceSpeed(curves_of(flops), 1e-5, 1e-5, asynchronous=True)
    nominal = nominal_machine()
    return replace(nominal, devices={**nominal.devices, "virtual:0": speed})


def curves_of(flops: float) -> dict[str, Curve]:
    """Return the compute curves of a virtual accelerator that computes at `flops`."""
    from bigmodel.profile.machine.machine import Curve
    from bigmodel.profile.trace.work import ATTENTION, MOVE, PRODUCT

    curve = Curve((1.0, 256.0), (2 / flops, 512 / flops), grows=True)
    return {f"{PRODUCT}:float32": curve, f"{ATTENTION}:float32": curve, MOVE: Curve((1.0,), (1e-12,))}


def _generated(core: EngineCore, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """Return the tokens that follow each prompt, generated together, and the seconds of each between the second of all
    sequences and the first one's last."""
    from bigmodel.server.engine import Request, SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    sinks = [_Tokens() for _ in prompts]
    for number, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        core.add(Request(f"{id(sink)}-{number}", prompt, params, sink))
    marks: list[tuple[float, int]] = []
    ended = False
    while not core.idle:
        core.step()
        counts = [len(sink.tokens) for sink in sinks]
        begins, ends = min(counts) >= 2, max(counts) == tokens
        if begins and (not marks or not ended):
            marks.append((time.perf_counter(), sum(counts)))
        ended = ends
    (begin, before), (end, after) = marks[0], marks[-1]
    return [sink.tokens for sink in sinks], (end - begin) / (after - before)


class _Tokens:
    """A sink that keeps tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, event: Any, /) -> None:
        self.tokens += getattr(event, "token_ids", ())
