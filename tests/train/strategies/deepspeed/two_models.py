"""Two models trained with a DeepSpeed plugin each, by one Accelerator or by two; the losses of both are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigmodel.train import Accelerator, DeepSpeedPlugin
from tests.train.multiprocess import fresh_states
from tests.train.strategies.curve import BATCH, FEATURES, Model, configure

STEPS = 4
BY_NAME = {"sharded gradients": 2, "sharded parameters": 3}
"""The ZeRO stage of each model."""


class Scale(nn.Module):
    """Has a parameter without dimensions, which DeepSpeed cannot send."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))


def rounds() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The global batch of each step, and its labels."""
    torch.manual_seed(0)
    return [(torch.randn(BATCH, FEATURES), torch.randint(0, 5, (BATCH,))) for _ in range(STEPS)]


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, and its optimizer."""
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def stepped(accelerator: Accelerator, model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    """Train one step on this rank's part of a batch; return the loss of the whole batch."""
    ranks, rank = accelerator.num_processes, accelerator.process_index
    loss = nn.functional.cross_entropy(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mean: torch.Tensor = accelerator.reduce(loss.detach(), "mean")  # type: ignore[assignment]
    return mean.item()


def train(folder: Path, accelerators: int) -> None:
    """Train both models in turns, with one Accelerator or two; the main process writes the losses to `folder`."""
    configure([])
    fresh_states()
    plugins = {name: DeepSpeedPlugin(zero_stage=stage) for name, stage in BY_NAME.items()}
    first = Accelerator(cpu=True, deepspeed_plugins=plugins)
    both = [first, first if accelerators == 1 else Accelerator()]
    prepared = []
    for seed, (name, accelerator) in enumerate(zip(BY_NAME, both)):
        accelerator.state.select_deepspeed_plugin(name)
        prepared.append(accelerator.prepare(*made(seed)))
        assert prepared[-1][0].zero_optimization_stage() == BY_NAME[name]
    scale = Scale()
    assert first.prepare_model(scale) is scale
    assert first.deepspeed_engine_wrapped.engine is prepared[0][0]
    assert both[1].deepspeed_engine_wrapped.engine is prepared[accelerators - 1][0]
    losses = [
        [stepped(accelerator, *pair, x, y) for accelerator, pair in zip(both, prepared, strict=True)]
        for x, y in rounds()
    ]
    weights = [accelerator.get_state_dict(model) for accelerator, (model, _) in zip(both, prepared, strict=True)]
    if first.is_main_process:
        names = [sorted(each) for each in weights]
        (folder / "losses.json").write_text(json.dumps([losses, names]))
    first.wait_for_everyone()
    for accelerator in both:
        accelerator.free_memory()
        accelerator.strategy.free()
