"""A classifier with training, validation, metrics and a checkpoint: the loop most scripts have.

python examples/classify.py
bigmodel launch --cpu --num_processes 2 examples/classify.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from bigmodel import Accelerator
from bigmodel.train.logging import tqdm
from bigmodel.train.seeding import set_seed

FEATURES, CLASSES, BATCH_SIZE = 10, 5, 100


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points whose class is the largest of five random directions."""

    def __init__(self, length: int, seed: int) -> None:
        directions = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
        self.x = torch.randn(length, FEATURES, generator=torch.Generator().manual_seed(seed))
        self.y = (self.x @ directions).argmax(1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __len__(self) -> int:
        return len(self.x)


def run_epoch(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]], optimizer: object, title: str
) -> tuple[float, float]:
    """Train (with an optimizer) or validate (without); accuracy and mean loss over every sample, once each."""
    loss_fn = nn.CrossEntropyLoss()
    predictions, targets, losses = [], [], []
    model.train(optimizer is not None)
    for x, y in tqdm(loader, desc=title):
        with torch.set_grad_enabled(optimizer is not None), accelerator.autocast():
            y_pred = model(x)
            loss = loss_fn(y_pred, y)
        if optimizer is not None:
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0, norm_type=2)
            optimizer.step()
        all_pred, all_tar, all_loss = accelerator.gather_for_metrics((y_pred, y, loss.detach()))
        predictions.append(all_pred.argmax(1))
        targets.append(all_tar)
        losses.append(all_loss.mean())
    accuracy = (torch.cat(predictions) == torch.cat(targets)).float().mean()
    return float(accuracy), float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--output_dir", type=Path)
    options = parser.parse_args()
    accelerator = Accelerator()
    set_seed(0)
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=1e-2)
    # A prepared scheduler takes one step for each process whenever it is stepped.
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * accelerator.num_processes)
    train = DataLoader(Points(options.samples, 1), batch_size=BATCH_SIZE, shuffle=True)
    val = DataLoader(Points(options.samples // 4, 2), batch_size=BATCH_SIZE)
    model, optimizer, scheduler, train, val = accelerator.prepare(model, optimizer, scheduler, train, val)
    for epoch in range(1, options.epochs + 1):
        run_epoch(accelerator, model, train, optimizer, f"{epoch}/{options.epochs} train")
        scheduler.step()
        accuracy, loss = run_epoch(accelerator, model, val, None, f"{epoch}/{options.epochs} val")
        accelerator.print(f"epoch {epoch}: val/acc {accuracy:.4f}, val/loss {loss:.4f}")
    if options.output_dir is not None:
        accelerator.save_state(options.output_dir)
    accelerator.print("training finish")
    accelerator.free_memory(model, optimizer, scheduler, train, val)
    accelerator.end_training()


if __name__ == "__main__":
    main()
