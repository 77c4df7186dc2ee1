"""How much faster does a streamed dense model generate with an MTP head or a draft model, beside the tokens of a step?

A step over streamed weights costs what fetching them does, however many tokens it verifies: proposals that are accepted
are free but for their arithmetic and for making them. The model's layers add nothing to the embedding of a token, so
that each token decides the next one, and what proposes it can be as right as is asked: always, or with noise in the
head's projection only sometimes. The work and the bytes are those of any weights.

The same model streamed by accelerate, with transformers' own assisted generation and without, is measured in the same
rounds.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .harness import Column, Limit, Report, Table, Variant, measure
from .harness.devices import first_device, is_virtual
from .harness.report import Cell
from .peers import always_proposing, generated, streamed_by_accelerate
from .serve_model import SIZES, VOCABULARY, PromptJob, run_jobs, word_tokenizer

if TYPE_CHECKING:
    import torch

    from bigmodel.server.engine import Engine

GAIN = 0.9
"""Times faster over tokens of a step, at least."""

NOISE = 0.1
"""Elements of the noise in a head's projection, beside ones, times the square root of their number."""

DEEP = "16x512"
"""As many layers as make one of them, which proposes, a small part of a pass: as in models that are worth streaming."""

MODELS = {**SIZES, DEEP: {**SIZES["4x512"], "num_hidden_layers": 16}}

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


@dataclass(frozen=True)
class Proposing:
    """What proposes tokens.

    Attributes:
        kind: ``"mtp"``, ``"draft"``, or "" for nothing.
        tokens: Most tokens proposed in a step.
        noise: Of the head's projection.
    """

    kind: str = ""
    tokens: int = 0
    noise: float = 0.0


WITHOUT = "nothing"
TRANSFORMERS, ASSISTED = "transformers: nothing", "transformers: draft model, 4 tokens"
WAYS = {
    WITHOUT: Proposing(),
    "MTP head, 1 token": Proposing("mtp", 1),
    "MTP head, 3 tokens": Proposing("mtp", 3),
    "MTP head, 3 tokens, often wrong": Proposing("mtp", 3, NOISE),
    "draft model, 4 tokens": Proposing("draft", 4),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default=None, help="layers x hidden size: 16x2048, 16x512, 8x1024, 4x512, 2x64")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of the answer")
    parser.add_argument("--bandwidth", type=float, default=0.25e9, help="bytes a second of the virtual link")
    parser.set_defaults(device="virtual", rounds=3)


@dataclass
class Peer:
    """The text as transformers generates it with a model that accelerate streams.

    Attributes:
        model: The model.
        assistant: The draft model; None for none.
    """

    model: Any
    job: PromptJob
    device: str
    assistant: Any = None
    per_step: list[float] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    def run(self) -> float:
        """Return the seconds of a token after the first."""
        how = {"assistant_model": self.assistant} if self.assistant is not None else {}
        found = generated(self.model, self.job.prompt, self.job.tokens, self.device, **how)
        self.per_step.append(found.per_step)
        self.answer = found.tokens
        return found.seconds_of_token

    @property
    def mean(self) -> float:
        """Mean tokens of a step."""
        return sum(self.per_step) / len(self.per_step)


@dataclass
class Way:
    """One way of generating the text.

    Attributes:
        engine: With what proposes.
        per_step: Tokens of a step after the first, of each run.
        answer: Tokens of the last run.
    """

    engine: Engine
    job: PromptJob
    per_step: list[float] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    def run(self) -> float:
        """Return the seconds of a token after the first, which ends the pass over the prompt."""
        accepted = self.engine.core.counts.accepted
        _, (sink,) = run_jobs(self.engine, [self.job])
        steps = self.job.tokens - (self.engine.core.counts.accepted - accepted)
        self.per_step.append((self.job.tokens - 1) / (steps - 1))
        self.answer = sink.token_ids
        return (sink.arrivals[-1] - sink.arrivals[0]) / (self.job.tokens - 1)

    @property
    def mean(self) -> float:
        """Mean tokens of a step."""
        return sum(self.per_step) / len(self.per_step)


def run(options: argparse.Namespace) -> Report:
    """Measure the seconds of a token with each way of proposing."""
    from bigmodel.devices import virtual
    from bigmodel.dispatch import dispatch_model

    virtually = is_virtual(options.device)
    size = options.size or ("2x64" if options.quick else DEEP if virtually else "16x2048")
    if virtually:
        virtual.enable(count=1, capacity="2GiB", bandwidth=options.bandwidth)
    device = first_device(options.device)
    tokens = 17 if options.quick else options.tokens
    whole = certain_model(MODELS[size], options.seed, device)
    layers = {f"model.layers.{index}": "cpu" for index in range(whole.config.num_hidden_layers)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), device)
    model = dispatch_model(whole, {**rest, **layers}, main_device=device)
    job = PromptJob([5, 6, 7, 8] * 4, tokens)
    ways = {
        name: Way(_engine(model, way, proposer(model, way, MODELS[size], options.seed, device)), job)
        for name, way in WAYS.items()
    }
    streamed = streamed_by_accelerate(certain_model(MODELS[size], options.seed, device), device, {**rest, **layers})
    draft = proposer(model, WAYS["draft model, 4 tokens"], MODELS[size], options.seed, device)
    peers = {
        TRANSFORMERS: Peer(streamed, job, device),
        ASSISTED: Peer(streamed, job, device, always_proposing(draft, WAYS["draft model, 4 tokens"].tokens)),
    }
    every: dict[str, Way | Peer] = {**ways, **peers}
    try:
        samples = measure([Variant(name, way.run) for name, way in every.items()], options.rounds, seed=options.seed)
    finally:
        for way in ways.values():
            way.engine.stop()
    wrong = [name for name, way in every.items() if way.answer != ways[WITHOUT].answer]
    if wrong:
        raise RuntimeError(f"other tokens with {', '.join(wrong)}")
    gains = {name: samples.ratio(WITHOUT, name).median for name in every}
    rows: list[list[Cell]] = [
        [name, way.mean, samples.median(name), gains[name], gains[name] / way.mean] for name, way in every.items()
    ]
    table = Table(
        f"A dense GLM of {size}, its layers streamed" + (f" at {options.bandwidth / 1e9:g} GB/s" if virtually else ""),
        [
            Column("proposed by"),
            Column("tokens of a step"),
            Column("token", "seconds"),
            Column("times faster"),
            Column("of tokens of a step"),
        ],
        rows,
    )
    least = min(gains[name] / ways[name].mean for name in ways if name != WITHOUT)
    limits = [] if options.quick else [Limit("times faster over tokens of a step, at least", least, ">=", GAIN)]
    return Report(
        "speculation",
        options.device,
        settings={"size": size, "tokens": tokens, "bandwidth": options.bandwidth},
        tables=[table],
        limits=limits,
        samples={"token": samples},
    )


def _engine(model: Any, way: Proposing, draft: Any) -> Engine:
    from bigmodel.server.engine import EngineOptions, build_engine

    limits = EngineOptions(1, kv_bytes=256 << 20, prefix_cache=False, row_multiple=1, draft_tokens=way.tokens or 1)
    engine = build_engine(model, word_tokenizer(), options=limits, draft_model=draft)
    engine.start()
    return engine


def certain_model(size: dict[str, Any], seed: int, device: str, **changes: Any) -> Any:
    """A dense GLM, on the host, in which each token decides the next one: bfloat16 on CUDA, else float32."""
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    heads = size["num_attention_heads"]
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=heads // 2,
        first_k_dense_replace=size["num_hidden_layers"],
        n_routed_experts=1,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        **{**size, "head_dim": size["hidden_size"] // heads, **changes},
    )
    torch.manual_seed(seed)
    model: Any = Glm4MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    return model.to(torch.bfloat16 if device.startswith("cuda") else torch.float32).eval()


def proposer(model: Any, way: Proposing, size: dict[str, Any], seed: int, device: str) -> Any:
    """What proposes tokens to ``model``, on ``device``; None for nothing."""
    import torch

    from bigmodel.dispatch import dispatch_model
    from bigmodel.profile.model.mtp import as_head

    if not way.kind:
        return None
    one = certain_model(size, seed, device, num_hidden_layers=1)
    with torch.no_grad():
        one.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.cpu())
        one.lm_head.weight.copy_(model.lm_head.weight.cpu())
        if way.kind == "mtp":
            one = as_head(one)
            one.model.embed_tokens.eh_proj.weight.copy_(_projection(size["hidden_size"], way.noise, seed))
    return dispatch_model(one.eval(), {"": device})


def _projection(width: int, noise: float, seed: int) -> torch.Tensor:
    """The projection that gives on the embedding, with noise of so much of its size, and leaves the state out."""
    import torch

    drawn = torch.randn(width, width, generator=torch.Generator().manual_seed(seed)) * noise / width**0.5
    return torch.cat([torch.eye(width) + drawn, torch.zeros(width, width)], dim=1)
