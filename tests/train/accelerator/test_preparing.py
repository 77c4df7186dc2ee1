"""prepare: anything, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, Sampler

from bigmodel.errors import TrainError
from bigmodel.train import AcceleratedOptimizer, AcceleratedScheduler, Accelerator, DataLoaderShard
from tests.train.multiprocess import on_ranks


def parts() -> tuple[nn.Module, torch.optim.Optimizer, StepLR, DataLoader[int]]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, StepLR(optimizer, 1), DataLoader(range(4))


KINDS = (nn.Module, AcceleratedOptimizer, AcceleratedScheduler, DataLoaderShard)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_objects_come_back_in_the_order_given(order: tuple[int, ...]) -> None:
    given = parts()
    prepared = Accelerator().prepare(*(given[i] for i in order))
    assert [isinstance(obj, KINDS[i]) for obj, i in zip(prepared, order, strict=True)] == [True] * 4


def test_one_object_comes_back_by_itself_and_others_as_they_are() -> None:
    accelerator = Accelerator()
    assert isinstance(accelerator.prepare(DataLoader(range(2))), DataLoaderShard)
    assert accelerator.prepare("text", 3) == ("text", 3)
    assert accelerator.prepare() == ()


def test_preparing_twice_changes_nothing() -> None:
    accelerator = Accelerator()
    prepared = accelerator.prepare(*parts())
    assert all(a is b for a, b in zip(accelerator.prepare(*prepared), prepared, strict=True))
    assert accelerator.prepare_model(prepared[0]) is prepared[0]
    assert accelerator.prepare_optimizer(prepared[1]) is prepared[1]
    assert accelerator.prepare_scheduler(prepared[2]) is prepared[2]
    assert accelerator.prepare_data_loader(prepared[3]) is prepared[3]
    assert len(accelerator._models) == len(accelerator._optimizers) == len(accelerator._dataloaders) == 1


def test_a_scheduler_follows_its_own_optimizer() -> None:
    accelerator = Accelerator()
    first, second = parts(), parts()
    prepared = accelerator.prepare(first[1], second[1], second[2])
    assert prepared[2].optimizers == [prepared[1]]


@pytest.mark.usefixtures("accelerators")
def test_models_and_batches_are_moved_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    accelerator = Accelerator()
    models = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[True, False])
    assert [model.weight.device.type for model in models] == ["virtual", "cpu"]
    with pytest.raises(TrainError, match="1 entries for 2 objects"):
        accelerator.prepare(1, 2, device_placement=[True])
    accelerator.device_placement = False
    batches = accelerator.prepare(DataLoader(range(2)))
    assert next(iter(batches)).device.type == "cpu"


@pytest.mark.usefixtures("accelerators")
def test_an_optimizer_made_before_trains_the_moved_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().cpu().clone()
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    optimizer.step()
    assert not torch.equal(model.weight.detach().cpu(), before)


def test_what_is_not_supported_says_what_to_use() -> None:
    with pytest.raises(TrainError, match="tensor parallelism"):
        Accelerator().deepspeed_ulysses_dl_adapter(None, None)


@on_ranks
def test_two_processes_share_several_loaders() -> None:
    accelerator = Accelerator()
    loader, other_loader = DataLoader(range(4)), DataLoader(range(6), batch_size=2)
    assert [len(item) for item in accelerator.prepare(loader, other_loader)] == [2, 2]


def test_an_optimizer_whose_zero_grad_takes_nothing_is_prepared() -> None:
    class Plain(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]
            super().zero_grad()

    model = nn.Linear(2, 2)
    model, optimizer = Accelerator().prepare(model, Plain(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.usefixtures("accelerators")
def test_the_state_of_an_optimizer_goes_where_the_model_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    accelerator = Accelerator()
    model, prepared = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    prepared.step()
    assert {state["exp_avg"].device for state in prepared.state.values()} == {torch.device("virtual:0")}


@pytest.mark.parametrize("batched", [True, False])
def test_a_sampler_of_one_s_own_may_be_changed_between_passes(batched: bool) -> None:
    class Order(Sampler[int]):
        reverse = False

        def __iter__(self) -> Iterator[int]:
            return iter([3, 2, 1, 0] if self.reverse else [0, 1, 2, 3])

        def __len__(self) -> int:
            return 4

    order = Order()
    given = {"batch_sampler": BatchSampler(order, 2, False)} if batched else {"sampler": order}
    loader = Accelerator().prepare(DataLoader(range(4), **given))
    first = torch.cat(list(loader)).tolist()
    order.reverse = True
    assert (first, torch.cat(list(loader)).tolist()) == ([0, 1, 2, 3], [3, 2, 1, 0])
