"""A small model trained for 12 steps: it saves after half of them and is resumed from there. Its losses are written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from bigmodel.launch import parse_launch
from bigmodel.launch.environment import launch_environment
from bigmodel.train import Accelerator, DataLoaderConfiguration
from tests.train.multiprocess import fresh_states

STRATEGIES = {
    "ddp": ["--distributed_type=MULTI_CPU"],
    "fsdp": ["--use_fsdp"],
    "fsdp_hybrid": ["--use_fsdp", "--fsdp_sharding_strategy=HYBRID_SHARD"],
    "fsdp_one_file": [
        "--use_fsdp",
        "--fsdp_state_dict_type=FULL_STATE_DICT",
        "--fsdp_offload_params=true",
        "--fsdp_activation_checkpointing=true",
        "--fsdp_reshard_after_forward=false",
    ],
    "zero_0": ["--use_deepspeed", "--zero_stage=0"],
    "zero_1": ["--use_deepspeed", "--zero_stage=1"],
    "zero_2_offload": ["--use_deepspeed", "--zero_stage=2", "--offload_optimizer_device=cpu"],
    "zero_3": ["--use_deepspeed", "--zero_stage=3"],
    "zero_3_offload": [
        "--use_deepspeed",
        "--zero_stage=3",
        "--offload_optimizer_device=cpu",
        "--offload_param_device=cpu",
    ],
}
"""The flags of `bigmodel launch` for each strategy."""

STEPS, ACCUMULATED, BATCH, FEATURES, CLASSES = 12, 2, 8, 12, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, 4 * FEATURES)
        self.down = nn.Linear(4 * FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=200)


def batches(first: int, last: int) -> list[list[tuple[Tensor, Tensor]]]:
    """For each step the global batches that are accumulated."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, ACCUMULATED, BATCH, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (STEPS, ACCUMULATED, BATCH), generator=generator)
    return [list(zip(x[step], y[step], strict=True)) for step in range(first, last)]


def train(accelerator: Accelerator, model, optimizer, scheduler, first: int, last: int) -> list[list[float]]:
    ranks, rank = accelerator.strategy.data_parallel()
    found = []
    for step in batches(first, last):
        total = 0.0
        norm = None
        for x, y in step:
            with accelerator.accumulate(model):
                mine, labels = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
                loss = nn.functional.cross_entropy(model(mine), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean").item() / ACCUMULATED
        found.append([total, float(norm)])
    return found


def configure(flags: list[str]) -> None:
    """Set the variables with which `bigmodel launch FLAGS` starts its processes, and those alone."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    config = parse_launch(["--cpu", "--num_processes=2", *flags, __file__]).config
    os.environ.update(launch_environment(config, processes_here=2, cpu=True))


def run(folder: Path) -> None:
    """Train, save, train on, load and train on again; the main process writes what it saw to `folder`."""
    fresh_states()
    # Global batches are split between the ranks, so the scheduler counts the same steps on any number of them.
    config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED, dataloader_config=config)
    # Each rank starts from other weights: rank 0's must win.
    model, optimizer, scheduler = accelerator.prepare(*build(seed=accelerator.process_index))
    losses = train(accelerator, model, optimizer, scheduler, 0, STEPS // 2)
    accelerator.save_state(folder / "state")
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    rest = train(accelerator, model, optimizer, scheduler, STEPS // 2, STEPS)
    accelerator.free_memory(model, optimizer, scheduler)
    accelerator.strategy.free()

    model, optimizer, scheduler = accelerator.prepare(*build(seed=100))
    accelerator.load_state(folder / "state")
    loaded = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())
        assert set(weights) == set(Model().state_dict())
    again = train(accelerator, model, optimizer, scheduler, STEPS // 2, STEPS)
    accelerator.save_model(model, folder / "exported")
    if accelerator.is_main_process:
        found = {"losses": losses + rest, "resumed": again, "rest": rest, "kind": accelerator.distributed_type.value}
        (folder / "curve.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.free_memory(model, optimizer, scheduler)


def run_strategy(folder: Path, name: str) -> None:
    """Do as `run`, with a strategy, in processes that have the variables with which `bigmodel launch` starts them."""
    configure(STRATEGIES[name])
    run(folder)
