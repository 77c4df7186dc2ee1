"""Does dispatching cost a fully resident model any time? It should not: no hooks, the same step time.

The dispatched model and the plain one share all tensors, so that only dispatching differs.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from .harness import Limit, Report, Variant, comparison_table, measure

if TYPE_CHECKING:
    from torch import nn

PLAIN = "plain"
OURS = "bigmodel, resident"
ACCELERATE = "accelerate, resident, hooks forced"
LIMIT = 1.01

DEVICES = ("cpu", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("model", nargs="?", default=None, help="llama-1b, llama-40, or a folder (default: llama-40)")
    parser.add_argument("--steps", type=int, default=8, help="decode steps behind each value")
    parser.set_defaults(rounds=15)


def run(options: argparse.Namespace) -> Report:
    """Measure step times of the plain and the dispatched model, and count modules with hooks."""
    from . import models
    from .checkpoints import checkpoint
    from .steps import Decoder

    folder = checkpoint(options.model or ("tiny" if options.quick else "llama-40"), options.workdir)
    plain = models.resident(folder, options.device)
    dispatched = _dispatched(plain, options.device)
    found = {PLAIN: plain, OURS: dispatched, ACCELERATE: _accelerated(plain, options.device)}
    decoders = {name: Decoder(model, options.device) for name, model in found.items()}
    variants = [Variant(name, partial(each.seconds_per_step, options.steps)) for name, each in decoders.items()]
    samples = measure(variants, options.rounds, seed=options.seed)
    over = samples.ratio(OURS, PLAIN).median
    return Report(
        "resident",
        options.device,
        settings={"model": folder.name, "steps": options.steps},
        tables=[comparison_table(f"One decode step of {folder.name.rpartition('-')[0]}", samples, PLAIN)],
        limits=[
            Limit("resident dispatched step over plain", over, "<=", LIMIT),
            Limit("modules with something left on them", hooked_modules(dispatched), "==", 0, "count"),
        ],
        samples={"step": samples},
    )


def hooked_modules(model: nn.Module) -> int:
    """Return the number of modules with hooks or a replaced forward."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(
        "forward" in module.__dict__ or any(getattr(module, kind) for kind in kinds) for module in model.modules()
    )


def sharing_twin(model: nn.Module) -> nn.Module:
    """Return another model object with the same tensors."""
    import copy

    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo=dict(tensors))


def _dispatched(plain: nn.Module, device: str) -> nn.Module:
    from bigmodel.dispatch import dispatch_model

    return dispatch_model(sharing_twin(plain), {"": device})


def _accelerated(plain: nn.Module, device: str) -> nn.Module:
    from accelerate import dispatch_model

    model: nn.Module = dispatch_model(sharing_twin(plain), {"": device}, force_hooks=True)
    return model
