"""Regression with a normaliser made on the main process, logged to a tracker.

python examples/track.py --log_with tensorboard --project_dir runs
WANDB_MODE=offline bigmodel launch --cpu --num_processes 2 examples/track.py --log_with wandb --project_dir runs
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigmodel import Accelerator
from bigmodel.train.seeding import set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log_with", default="tensorboard")
    parser.add_argument("--project_dir", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    accelerator = Accelerator(log_with=options.log_with, project_dir=options.project_dir)
    accelerator.init_trackers("regression", config={"steps": options.steps, "lr": 0.05})
    set_seed(0)
    x = torch.randn(512, 3) * 20 + 5
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])

    # One process measures; all of them read what it found.
    path = options.project_dir / "normaliser.json"
    if accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"mean": x.mean(0).tolist(), "scale": x.std(0).tolist()}))
    accelerator.wait_for_everyone()
    normaliser = json.loads(path.read_text())
    x = (x - torch.tensor(normaliser["mean"])) / torch.tensor(normaliser["scale"])

    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(x, y / y.std()), batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while step < options.steps:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"train/loss": accelerator.reduce(loss.detach(), "mean")}, step=step)
            step += 1
    accelerator.print(f"loss {loss.item():.4f} after {step} steps")
    policy = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        accelerator.save(policy.state_dict(), options.project_dir / "policy.pt")
    accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()


if __name__ == "__main__":
    main()
