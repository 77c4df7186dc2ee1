"""prepare: objects of every kind, in any order; models are wrapped for the run and unwrapped again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, Sampler

from bigmodel.errors import TrainError
from bigmodel.train import AcceleratedOptimizer, AcceleratedScheduler, Accelerator, DataLoaderShard
from bigmodel.train.accelerator.preparing import ORDER, is_loader, is_model, is_optimizer, is_scheduler, those
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


def test_unwrapping_gives_the_model_back_with_or_without_its_wrappers() -> None:
    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="eager")
    bare = nn.Linear(2, 2)
    model = accelerator.prepare(bare)
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is bare
    assert "forward" in bare.__dict__
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in bare.__dict__


def test_a_dispatched_model_is_found() -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(1, 1))
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"a": 0, "b": "cpu"}
    assert accelerator.verify_device_map(model)


@on_ranks
def test_two_processes_wrap_models_that_train() -> None:
    accelerator = Accelerator()
    bare = nn.Linear(2, 2)
    model = accelerator.prepare(bare)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert accelerator.unwrap_model(model) is bare
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert accelerator.prepare(frozen) is frozen
    other = nn.Linear(2, 2)
    assert accelerator.prepare_model(other, evaluation_mode=True) is other


@on_ranks
def test_a_dispatched_model_cannot_be_shared_by_processes() -> None:
    model = nn.Linear(1, 1)
    model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(TrainError, match="dispatched over several devices"):
        Accelerator().prepare(model)


class OwnSchedule:
    """A scheduler by its methods alone."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def get_last_lr(self) -> list[float]:
        return [0.1]


def test_every_object_is_of_one_kind() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader: Any = DataLoader([1])
    kinds = (is_model, is_optimizer, is_scheduler, is_loader)
    for number, obj in enumerate((model, optimizer, schedule, loader)):
        assert [kind(obj) for kind in kinds] == [number == other for other in range(4)]
    assert is_scheduler(OwnSchedule())
    assert not any(kind(3) for kind in kinds)
    assert those(nn.Module, [model, None, optimizer]) == [model]
    assert [next(n for n, kind in enumerate(ORDER) if kind(obj)) for obj in (loader, model, optimizer)] == [0, 1, 2]


def test_a_prepared_scheduler_is_not_taken_for_a_bare_one() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    prepared = Accelerator().prepare(torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert not is_scheduler(prepared)
