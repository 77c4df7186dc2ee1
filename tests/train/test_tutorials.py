"""Training scripts as tutorials show them, with nothing changed but the import."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from bigmodel import Accelerator
from tests.train.multiprocess import on_ranks


class Points(Dataset[Any]):
    def __init__(self, length: int = 1000, features: int = 10, classes: int = 5) -> None:
        self.x = torch.randn(length, features)
        self.y = torch.randint(0, classes, (length,))

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]

    def __len__(self) -> int:
        return len(self.x)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_notebook_with_metrics_progress_bars_and_checkpoints(tmp_path: Path) -> None:
    run_the_notebook(tmp_path)


@pytest.mark.slow
@on_ranks
def test_the_notebook_on_two_processes(folder: Path) -> None:
    run_the_notebook(folder)


def run_the_notebook(folder: Path) -> None:
    """The notebook is for one process. For several, losses of all processes are joined, and all of them wait."""
    accuracy = pytest.importorskip("torchmetrics.functional", reason="torchmetrics is not installed").accuracy
    epochs, batch_size, num_classes = 2, 100, 5
    output_dir = folder / "accelerator_checkpoint"
    model: Any = nn.Linear(10, num_classes)
    optimizer: Any = optim.AdamW(model.parameters(), lr=0.001, betas=(0.9, 0.999), weight_decay=1e-2)
    lr_sche = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs, eta_min=0.1)
    loss_fn = nn.CrossEntropyLoss()
    train_dataloader: Any = DataLoader(Points(), batch_size=batch_size, shuffle=True, num_workers=0)
    val_dataloader: Any = DataLoader(Points(250), batch_size=batch_size, shuffle=False, num_workers=0)

    accelerator = Accelerator()
    assert list(accelerator.get_state_dict(model, unwrap=True)) == ["weight", "bias"]
    model, optimizer, train_dataloader, val_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, val_dataloader
    )
    accelerator.clip_grad_norm_(parameters=model.parameters(), max_norm=1, norm_type=2)
    for epoch in range(1, epochs + 1):
        model.train()
        all_predictions, all_targets, all_losses = [], [], []
        with tqdm(total=len(train_dataloader), desc=f"{epoch}/{epochs}", disable=True) as pbar:
            for x, y in train_dataloader:
                optimizer.zero_grad()
                with accelerator.autocast():
                    y_pred = model(x)
                    loss = loss_fn(y_pred, y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0, norm_type=2)
                optimizer.step()
                pbar.update(1)
                all_pred, all_tar, all_loss = accelerator.gather_for_metrics((y_pred, y, loss))
                all_predictions.append(all_pred)
                all_targets.append(all_tar)
                all_losses.append(all_loss)
        predictions, target = torch.cat(all_predictions), torch.cat(all_targets)
        assert 0 <= accuracy(preds=predictions, target=target, task="multiclass", num_classes=num_classes) <= 1
        assert torch.mean(torch.stack(all_losses)) > 0
        lr_sche.step()

        model.eval()
        seen = 0
        for x, y in val_dataloader:
            with torch.inference_mode():
                y_pred = model(x)
            seen += len(accelerator.gather_for_metrics((y_pred, y, loss_fn(y_pred, y)))[0])
        assert seen == 250

        accelerator.wait_for_everyone()
        unwrapped_model = accelerator.unwrap_model(model)
        if accelerator.is_local_main_process:
            output_dir.mkdir(exist_ok=True)
            state = {"model": unwrapped_model.state_dict(), "optimizer": optimizer.state_dict()}
            accelerator.save(obj={**state, "lr_sche": lr_sche.state_dict()}, f=output_dir / "accelerator.last.pth")
    accelerator.print("training finish")

    accelerator.save_state(output_dir=output_dir)
    accelerator.load_state(input_dir=output_dir)
    kept = torch.load(output_dir / "accelerator.last.pth", map_location="cpu")
    assert torch.equal(kept["model"]["weight"], unwrapped_model.weight)
    assert set(torch.load(output_dir / "optimizer.bin")) == {"state", "param_groups"}


@pytest.mark.parametrize("device_placement", [True, False])
def test_accumulating_with_a_schedule_and_saving_the_model(tmp_path: Path, device_placement: bool) -> None:
    assert accumulate_and_save(tmp_path, device_placement) == pytest.approx([0.01])


@on_ranks
def test_accumulating_and_saving_on_two_processes(folder: Path) -> None:
    assert accumulate_and_save(folder) == pytest.approx([0.01])


def accumulate_and_save(folder: Path, device_placement: bool = True) -> list[float]:
    """Five optimizer steps on one process; on two of them three, of which each counts twice in the schedule."""
    accelerator = Accelerator(gradient_accumulation_steps=2, device_placement=device_placement)
    model: Any = nn.Linear(10, 5)
    optimizer: Any = optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = optim.lr_scheduler.StepLR(optimizer, 5)
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(Points(40), batch_size=4), scheduler
    )
    assert len(training_dataloader) == 10 // accelerator.num_processes
    for inputs, label in training_dataloader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = F.cross_entropy(model(inputs), label)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    accelerator.wait_for_everyone()
    accelerator.save_model(model, folder)
    accelerator.save_model(model, folder / "b", max_shard_size="1GB", safe_serialization=True)
    accelerator.save_model(model, folder / "c", safe_serialization=False)
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.load_state_dict(torch.load(folder / "c" / "pytorch_model.bin"))
    accelerator.save_state(folder / "state")
    accelerator.load_state(folder / "state")
    return list(scheduler.get_last_lr())


def train_and_save_whole_model(model_path: Path) -> None:
    accelerator = Accelerator()
    device = accelerator.device
    model: Any = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5)).to(device)
    optimizer: Any = torch.optim.Adam(model.parameters())
    data: Any = DataLoader(Points(20), shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    model.train()
    for source, targets in data:
        source, targets = source.to(device), targets.to(device)
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(source), targets))
        optimizer.step()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unwrapped_model = accelerator.unwrap_model(model)
        accelerator.save(unwrapped_model, model_path)
    accelerator.wait_for_everyone()
    assert isinstance(torch.load(model_path, weights_only=False), nn.Sequential)


def test_saving_a_whole_model_from_the_main_process(tmp_path: Path) -> None:
    train_and_save_whole_model(tmp_path / "model.pt")


@on_ranks
def test_saving_a_whole_model_from_the_main_process_of_two(folder: Path) -> None:
    train_and_save_whole_model(folder / "model.pt")


@on_ranks
def test_a_normalizer_written_by_one_process_and_read_by_all(folder: Path) -> None:
    accelerator = Accelerator()
    if accelerator.is_main_process:
        (folder / "normalizer.pkl").write_bytes(pickle.dumps({"mean": 0.5}))
    accelerator.wait_for_everyone()
    assert pickle.loads((folder / "normalizer.pkl").read_bytes()) == {"mean": 0.5}
