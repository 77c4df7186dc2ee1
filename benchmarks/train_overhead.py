"""How much time does the Accelerator add to a training step of plain PyTorch?

The same loop (loader, forward, backward, clipping, optimizer, schedule) is run bare, with bigmodel and with accelerate.
With a very small model the difference is the overhead per step, in microseconds; a longer step (``--step``) shows it as
a fraction.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from .harness import Column, Limit, Report, Samples, Table, Variant, comparison_table, elapsed, measure

BARE, BIGMODEL, ACCELERATE = "bare PyTorch", "bigmodel", "accelerate"
LIMIT = 0.01

DEVICES = ("cpu", "cuda")
"""Devices that this benchmark supports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=int, default=400, help="steps of the small model behind each value")
    parser.add_argument("--step", type=float, default=0.020, help="seconds of the step overhead is held against")
    parser.add_argument("--precision", default="no", choices=["no", "bf16", "fp16"], help="mixed precision")
    parser.set_defaults(rounds=15, threads=1)


def run(options: argparse.Namespace) -> Report:
    """Measure steps of a tiny model, and of one whose step takes ``--step`` seconds."""
    import torch

    torch.set_num_threads(options.threads or 1)
    if options.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    steps = 20 if options.quick else options.steps
    tiny = _measured(options, width=8, steps=steps)
    bare = tiny.median(BARE)
    added = {name: tiny.median(name) - bare for name in (BIGMODEL, ACCELERATE)}
    width = 8 if options.quick else _width_of_a_step(options)
    real = _measured(options, width, steps=max(steps // 20, 1))
    rows = [[name, tiny.median(name), seconds, seconds / options.step] for name, seconds in added.items()]
    columns = [
        Column("loop"),
        Column("tiny step", "seconds"),
        Column("added", "seconds"),
        Column("of a step", "percent"),
    ]
    tables = [
        Table(
            f"Added to each step, beside {bare * 1e6:.0f} µs of a bare loop", columns, [[BARE, bare, None, None], *rows]
        ),
        comparison_table("A tiny step", tiny, BARE),
        comparison_table(f"A step of a model {width} wide", real, BARE),
    ]
    limits = [
        Limit(
            f"added by bigmodel to a step of {options.step * 1e3:.0f} ms", added[BIGMODEL] / options.step, "<=", LIMIT
        ),
        Limit("added by bigmodel, in seconds, against accelerate", added[BIGMODEL], "<=", added[ACCELERATE], "seconds"),
    ]
    settings = {"precision": options.precision, "steps": steps, "width": width}
    return Report("train_overhead", options.device, settings, tables, limits, samples={"tiny": tiny, "real": real})


def _measured(options: argparse.Namespace, width: int, steps: int) -> Samples:
    makers: dict[str, Callable[..., Any]] = {BARE: _bare, BIGMODEL: _bigmodel, ACCELERATE: _accelerate}
    variants = []
    for name, make in makers.items():
        epoch = make(options, width, steps)
        epoch()
        variants.append(Variant(name, partial(_seconds, epoch, options.device, steps)))
    return measure(variants, options.rounds, seed=options.seed)


def _seconds(epoch: Callable[[], None], device: str, steps: int) -> float:
    return elapsed(epoch, device) / steps


def _parts(width: int, steps: int, device: str) -> tuple[Any, Any, Any, Any]:
    """Return model, optimizer, schedule and loader."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(2))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loader = DataLoader(TensorDataset(torch.randn(32 * steps, width)), batch_size=32, shuffle=True)
    return model, optimizer, schedule, loader


def _bare(options: argparse.Namespace, width: int, steps: int) -> Callable[[], None]:
    import torch

    model, optimizer, schedule, loader = _parts(width, steps, options.device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
    scaler = torch.amp.GradScaler(options.device, enabled=options.precision == "fp16")

    def epoch() -> None:
        for (x,) in loader:
            x = x.to(options.device)
            with torch.autocast(options.device, dtype=dtype, enabled=dtype is not None):
                out = model(x)
            loss = out.float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()

    def plain() -> None:
        for (x,) in loader:
            loss = model(x.to(options.device)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return plain if options.precision == "no" else epoch


def _bigmodel(options: argparse.Namespace, width: int, steps: int) -> Callable[[], None]:
    from bigmodel.train import Accelerator

    return _prepared(Accelerator(mixed_precision=options.precision), options, width, steps)


def _accelerate(options: argparse.Namespace, width: int, steps: int) -> Callable[[], None]:
    from accelerate import Accelerator

    return _prepared(Accelerator(mixed_precision=options.precision), options, width, steps)


def _prepared(accelerator: Any, options: argparse.Namespace, width: int, steps: int) -> Callable[[], None]:
    model, optimizer, schedule, loader = accelerator.prepare(*_parts(width, steps, options.device))

    def epoch() -> None:
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    return epoch


def _width_of_a_step(options: argparse.Namespace) -> int:
    """Return the width of a model whose step takes about ``--step`` seconds."""
    width = 128
    while width < 8192:
        epoch = _bare(options, width, 3)
        epoch()
        if elapsed(epoch, options.device) / 3 >= options.step:
            return width
        width += width // 4
    return width
