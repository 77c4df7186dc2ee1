"""Are only the experts fetched that routers choose, and how many tokens per second does that give?

A mixture of experts is stored in host memory and runs on an accelerator behind a link. Fetching experts one by one,
with a small and a large cache, is compared with streaming whole layers, and with accelerate. The routers' choices are
counted by hooks on the routers, independently of the mechanism whose bytes are checked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from .harness import Column, Limit, Report, Table, Variant, comparison_table, measure
from .harness.devices import first_device
from .harness.report import Cell

if TYPE_CHECKING:
    from torch import nn

    from .steps import Decoder

ROOMY, TIGHT = "bigmodel, chosen experts, half cached", "bigmodel, chosen experts, cache as two layers"
LAYERS, ACCELERATE = "bigmodel, whole layers", "accelerate, whole layers"
LINK = 4e9

DEVICES = ("virtual", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("model", nargs="?", default=None, help="mixtral, or a folder (default: mixtral)")
    parser.add_argument("--link", type=float, default=LINK / 1e9, help="GB/s of the virtual link")
    parser.add_argument("--steps", type=int, default=4, help="decode steps behind each value")
    parser.set_defaults(device="virtual", rounds=3)


def run(options: argparse.Namespace) -> Report:
    """Measure decode steps of each variant, and compare the bytes fetched with the experts chosen."""
    import torch

    from bigmodel.devices import virtual

    from .checkpoints import checkpoint
    from .steps import Decoder

    folder = checkpoint(options.model or ("tiny-mixtral" if options.quick else "mixtral"), options.workdir)
    torch.set_num_threads(options.threads or 1)
    device = first_device(options.device)
    if device.startswith("virtual"):
        virtual.enable(count=1, bandwidth=options.link * 1e9)
    steps = 2 if options.quick else options.steps
    models = _models(folder, device)
    decoders = {name: Decoder(model, device) for name, model in models.items()}
    variants = [Variant(name, partial(_seconds, decoder, steps)) for name, decoder in decoders.items()]
    samples = measure(variants, options.rounds, seed=options.seed)
    accounts = {name: account(models[name], decoders[name], steps) for name in (ROOMY, TIGHT)}
    return Report(
        "experts",
        options.device,
        settings={"model": folder.name.rpartition("-")[0], "link": options.link * 1e9, "steps": steps},
        tables=[comparison_table("A decode step", samples, LAYERS), _accounts_table(accounts)],
        limits=[
            Limit(f"{name}: bytes fetched beyond chosen experts less hits", found["beyond"], "==", 0, "bytes")
            for name, found in accounts.items()
        ]
        + [
            Limit(f"{name}: step over whole layers", samples.ratio(name, LAYERS).median, "<=", 1.0) for name in accounts
        ],
        samples={"experts": samples},
    )


def _models(folder: Path, device: str) -> dict[str, nn.Module]:
    """Return the same model offloaded in each variant."""
    from bigmodel.dispatch.attach.expert_builder import ExpertBuilder

    from . import models
    from .peers import streamed_by_accelerate

    experts = sum(p.nbytes for n, p in models.skeleton(folder).named_parameters() if ".experts." in n)
    with mock.patch.object(ExpertBuilder, "find", return_value={}):
        whole = _offloaded(folder, device)
    found = {
        ROOMY: _offloaded(folder, device, expert_cache=experts // 2),
        TIGHT: _offloaded(folder, device),
        LAYERS: whole,
    }
    found[ACCELERATE] = streamed_by_accelerate(_in_memory(folder), device)
    return found


def _in_memory(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model


def _offloaded(folder: Path, device: str, **how: Any) -> nn.Module:
    from bigmodel.dispatch import dispatch_model

    return dispatch_model(_in_memory(folder), {"": "cpu"}, main_device=device, **how)


def _seconds(decoder: Decoder, steps: int) -> float:
    return decoder.seconds_per_step(steps)


@contextmanager
def counting_choices(model: nn.Module, count: Callable[[int], None]) -> Iterator[None]:
    """Within this context call `count` with the number of experts that each router chooses in each forward."""

    def listener(module: Any, inputs: Any, output: Any) -> None:
        count(int(output[-1].unique().numel()))

    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    handles = [router.register_forward_hook(listener) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def account(model: nn.Module, decoder: Decoder, steps: int) -> dict[str, float]:
    """Decode once more, and return experts chosen, hits, bytes fetched, bytes of an expert, and unexplained bytes."""
    experts = next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))
    each = sum(parameter[0].nbytes for parameter in experts.parameters())
    chosen: list[int] = []
    decoder.start()  # a prompt chooses nearly every expert, so that whole layers are fetched
    before = _counters(model)
    with counting_choices(model, chosen.append):
        for _ in range(steps):
            decoder.step()
    after = _counters(model)
    hits, fetched = (after[name] - before[name] for name in ("hits", "bytes_fetched"))
    beyond = fetched - (sum(chosen) - hits) * each
    return {"chosen": sum(chosen), "hits": hits, "fetched": fetched, "expert": each, "beyond": beyond}


def _counters(model: Any) -> dict[str, float]:
    counters: dict[str, float] = next(iter(model.dispatch_stats()["experts"].values()))
    return counters


def _accounts_table(accounts: dict[str, dict[str, float]]) -> Table:
    names = ("chosen", "hits", "fetched", "expert", "beyond")
    kinds = ("count", "count", "bytes", "bytes", "bytes")
    rows: list[list[Cell]] = [[way, *(found[name] for name in names)] for way, found in accounts.items()]
    return Table("What was fetched", [Column("variant"), *(Column(n, k) for n, k in zip(names, kinds))], rows)
