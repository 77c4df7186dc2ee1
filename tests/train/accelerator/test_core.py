"""The Accelerator's constructor arguments, and whole training runs."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.errors import TrainError
from bigmodel.train import (
    Accelerator,
    AcceleratorState,
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradientState,
    GradScalerKwargs,
    PartialState,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)
from tests.train.accelerator.models import Run
from tests.train.multiprocess import fresh_states, on_ranks, run_on_ranks


def test_every_argument_of_accelerate_s_is_taken() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate, whose interface is compared, is not installed")
    theirs = list(inspect.signature(accelerate.Accelerator.__init__).parameters)
    ours = list(inspect.signature(Accelerator.__init__).parameters)
    assert ours == theirs


def test_every_member_of_accelerate_s_is_there() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate, whose interface is compared, is not installed")
    accelerator = Accelerator()
    public = [name for name in dir(accelerate.Accelerator) if not name.startswith("_")]
    missing = [name for name in public if not hasattr(type(accelerator), name)]
    assert missing == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mixed_precision": "fp12"}, "'fp12'"),
        ({"gradient_accumulation_steps": 0}, "over 0 steps"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin()},
            "not both",
        ),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "two AutocastKwargs"),
        ({"kwargs_handlers": [3]}, "holds 3"),
        ({"rng_types": ["dice"]}, "'dice'"),
        ({"dataloader_config": DataLoaderConfiguration(data_seed=3)}, "use_seedable_sampler"),
        ({"megatron_lm_plugin": object()}, "Megatron-LM is not supported"),
        ({"dynamo_backend": "eager", "dynamo_plugin": object()}, "not both"),
        ({"deepspeed_plugin": object(), "deepspeed_plugins": {}}, "not both"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(TrainError, match=says):
        Accelerator(**arguments)


def test_the_project_s_folder_is_known(tmp_path: Path) -> None:
    accelerator = Accelerator(project_dir=tmp_path)
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)
    config = ProjectConfiguration(project_dir="a", logging_dir="b")
    accelerator = Accelerator(project_config=config)
    assert (accelerator.project_dir, accelerator.logging_dir) == ("a", "b")


def test_the_launcher_s_accumulation_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Accelerator().gradient_accumulation_steps == 4


def test_the_scaler_is_made_for_fp16_with_its_arguments() -> None:
    assert Accelerator().scaler is None
    fresh_states()
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    assert accelerator.scaler.get_scale() == 8.0


def bare_losses(steps: int) -> tuple[list[float], torch.Tensor]:
    """The run of `Run`, in a loop of PyTorch alone."""
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
    losses = []
    loader = DataLoader(data, batch_size=8, shuffle=True)
    while len(losses) < steps:
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, nn.utils.parameters_to_vector(net.parameters()).detach()


def test_one_process_trains_bitwise_as_a_bare_loop() -> None:
    run = Run(Accelerator())
    losses = run.epoch() + run.epoch()
    expected, weights = bare_losses(12)
    assert losses == expected
    assert torch.equal(run.weights(), weights)


def losses(accumulation: int) -> list[float]:
    """Train 50 steps of the same global batches, on any number of processes."""
    fresh_states()
    run = Run(Accelerator(gradient_accumulation_steps=accumulation), samples=80, dropout=0.0)
    if run.accelerator.num_processes == 1:
        run.schedule._moves = 2  # as often in a step as that of two processes
    return [loss for _ in range(5) for loss in run.epoch()]


def compare_losses(expected: list[list[float]]) -> None:
    for accumulation, of_one in zip((1, 2), expected):
        found = losses(accumulation)
        assert len(found) == len(of_one) == 50
        torch.testing.assert_close(torch.tensor(found), torch.tensor(of_one), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_two_processes_train_as_one_within_1e_6() -> None:
    run_on_ranks(compare_losses, [losses(accumulation) for accumulation in (1, 2)])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains(precision: str) -> None:
    run = Run(Accelerator(mixed_precision=precision), dropout=0.0)
    losses = [sum(run.epoch()) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert run.model(torch.ones(1, 6)).dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in run.model.parameters())


def test_an_overflowing_step_is_skipped_reported_and_not_scheduled() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    run = Run(accelerator, dropout=0.0)
    run.epoch()
    weights, rate, scale = run.weights(), run.schedule.get_last_lr(), accelerator.scaler.get_scale()
    run.step(torch.full((8, 6), float("inf")), torch.zeros(8, dtype=torch.int64))
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(run.weights(), weights)
    assert run.schedule.get_last_lr() == rate
    assert accelerator.scaler.get_scale() == scale / 2
    run.epoch()
    assert not accelerator.optimizer_step_was_skipped


def test_it_describes_itself() -> None:
    assert "Num processes: 1" in repr(Accelerator())


def test_handlers_are_found_by_their_class() -> None:
    autocast, scaler = AutocastKwargs(), GradScalerKwargs()
    accelerator = Accelerator(kwargs_handlers=[autocast, scaler])
    assert accelerator.handlers == {AutocastKwargs: autocast, GradScalerKwargs: scaler}
    assert accelerator.autocast_handler is autocast


def test_the_launcher_s_accumulation_steps_override_the_argument_but_not_a_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Accelerator(gradient_accumulation_steps=3).gradient_accumulation_steps == 3
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    assert Accelerator(gradient_accumulation_steps=3).gradient_accumulation_steps == 5
    plugin = GradientAccumulationPlugin(num_steps=2)
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_state.plugin is plugin
    assert Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin()).gradient_accumulation_steps == 1


def test_the_deprecated_argument_split_batches_sets_the_loader_configuration() -> None:
    assert Accelerator(split_batches=True).split_batches
    given = DataLoaderConfiguration(split_batches=True)
    assert Accelerator(dataloader_config=given).dataloader_config is given


def test_a_project_s_own_folder_wins_over_the_argument() -> None:
    assert Accelerator(project_config=ProjectConfiguration("own"), project_dir="other").project_dir == "own"
    assert Accelerator(project_config=ProjectConfiguration(), project_dir="other").project_dir == "other"


def test_generators_are_known_by_name() -> None:
    assert Accelerator().rng_types == [RNGType.GENERATOR]
    assert Accelerator(rng_types=["torch", RNGType.CUDA]).rng_types == [RNGType.TORCH, RNGType.CUDA]


@pytest.mark.parametrize(
    "arguments", [{"dynamo_backend": "eager"}, {"dynamo_plugin": TorchDynamoPlugin(backend="eager")}]
)
def test_compilation_is_configured_by_name_or_plugin(arguments: dict[str, Any]) -> None:
    assert Accelerator(**arguments).state.dynamo_plugin.backend == "eager"


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(12.0)


class ShardedStream(Stream):
    num_shards = 4

    def __init__(self, numbers: Any = range(12)) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.tensor(list(self.numbers), dtype=torch.float32)

    def shard(self, num_shards: int, index: int) -> ShardedStream:
        return ShardedStream(self.numbers[index::num_shards])


def check_pickling(dataset: Any, **options: Any) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
    expected = torch.cat(list(loader)).tolist()
    iterator = iter(loader)
    next(iterator)
    copy = pickle.loads(pickle.dumps(accelerator))
    assert copy.state.__dict__ is accelerator.state.__dict__
    assert copy.gradient_state.__dict__ is accelerator.gradient_state.__dict__
    assert torch.cat(list(copy._dataloaders[0])).tolist() == expected
    del iterator


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("dataset", [Stream(), ShardedStream(), range(12)], ids=["stream", "sharded", "map"])
def test_an_accelerator_with_a_prepared_loader_can_be_pickled(dataset: Any, stateful: bool) -> None:
    if stateful:
        pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    check_pickling(dataset, use_stateful_dataloader=stateful)


@pytest.mark.slow
@on_ranks
def test_so_can_those_of_two_processes() -> None:
    for dataset in (Stream(), ShardedStream(), range(12)):
        for options in ({}, {"dispatch_batches": True}, {"dispatch_batches": False}):
            fresh_states()
            check_pickling(dataset, **options)


def test_where_there_is_no_state_an_unpickled_accelerator_brings_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    accelerator.prepare(DataLoader(Stream(), batch_size=2))
    written = pickle.dumps(accelerator)
    for state in (PartialState, AcceleratorState, GradientState):
        monkeypatch.setattr(state, "_shared_state", {})
    copy = pickle.loads(written)
    assert (copy.num_processes, copy.gradient_accumulation_steps, copy.gradient_state.dataloader_references) == (
        1,
        3,
        [],
    )
    assert AcceleratorState().__dict__ is copy.state.__dict__
