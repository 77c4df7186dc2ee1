"""The checks of `bigmodel test`, run in every process: the configuration must compute what one process would."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator, gather_object

_SAMPLES, _FEATURES, _BATCH, _STEPS = 61, 6, 4, 8


def main() -> None:
    """Run every check; the first failure raises an error that says what differs."""
    accelerator = Accelerator()
    accelerator.print(f"Processes: {accelerator.num_processes} ({accelerator.distributed_type.value})")
    accelerator.print(f"Device of the main process: {accelerator.device}, precision {accelerator.mixed_precision}")
    for check in (check_ranks, check_collectives, check_data, check_training):
        check(accelerator)
        accelerator.wait_for_everyone()
        accelerator.print(f"{check.__doc__}: right")
    accelerator.print("The configuration works.")
    accelerator.free_memory()
    accelerator.end_training()


def check_ranks(accelerator: Accelerator) -> None:
    """Every process has a distinct rank"""
    numbers = gather_object([accelerator.process_index])
    _require(sorted(numbers) == list(range(accelerator.num_processes)), f"the processes are numbered {numbers}")


def check_collectives(accelerator: Accelerator) -> None:
    """Gathering, reducing and padding across processes"""
    rank, ranks = accelerator.process_index, accelerator.num_processes
    own = torch.full((2,), float(rank), device=accelerator.device)
    gathered = accelerator.gather(own)
    expected = torch.arange(ranks, device=accelerator.device).repeat_interleave(2).float()
    _require(torch.equal(gathered, expected), f"gather gave {gathered.tolist()}")
    total = accelerator.reduce(own, "sum")
    _require(float(total[0]) == ranks * (ranks - 1) / 2, f"reduce gave {total.tolist()}")
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=accelerator.device))
    _require(padded.shape[0] == ranks, f"pad_across_processes gave {padded.shape[0]} rows")


def check_data(accelerator: Accelerator) -> None:
    """Every sample is read once"""
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(_SAMPLES)), batch_size=_BATCH))
    seen = torch.cat([accelerator.gather_for_metrics(batch) for (batch,) in loader])
    _require(sorted(seen.tolist()) == list(range(_SAMPLES)), f"{len(seen)} samples were read instead of {_SAMPLES}")


def check_training(accelerator: Accelerator) -> None:
    """Training gives what one process gives"""
    torch.manual_seed(0)
    alone = nn.Linear(_FEATURES, 2)
    shared = nn.Linear(_FEATURES, 2)
    shared.load_state_dict(alone.state_dict())
    batches = torch.randn(_STEPS, _BATCH * accelerator.num_processes, _FEATURES)
    _train_alone(alone, batches)
    model, optimizer = accelerator.prepare(shared, torch.optim.SGD(shared.parameters(), lr=0.1))
    ranks, rank = accelerator.strategy.data_parallel()
    for batch in batches:
        loss = _loss(model(batch.chunk(ranks)[rank].to(accelerator.device)))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    trained = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return
    tolerance = 1e-5 if accelerator.mixed_precision == "no" else 5e-2
    for name, value in alone.state_dict().items():
        difference = float((trained[name].float().cpu() - value).abs().max())
        _require(difference <= tolerance, f"{name} differs by {difference:.1e} from training in one process")


def _train_alone(model: nn.Module, batches: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        _loss(model(batch)).backward()
        optimizer.step()


def _loss(outputs: Tensor) -> Tensor:
    return outputs.float().pow(2).mean()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise TrainError(f"bigmodel test: {message}")


if __name__ == "__main__":
    main()
