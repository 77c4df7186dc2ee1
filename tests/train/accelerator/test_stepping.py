"""Gradient accumulation, clipping, autocast, profiling, and join_uneven_inputs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bigmodel.errors import TrainError
from bigmodel.train import (
    Accelerator,
    AutocastKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    PartialState,
    ProfileKwargs,
    prepare_data_loader,
)
from bigmodel.train.accelerator.stepping import uneven_batches
from bigmodel.train.collectives import gather, gather_object
from tests.train.multiprocess import fresh_states, on_ranks


def linear(value: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def windows(accelerator: Accelerator, batches: int) -> list[bool]:
    """Return which passes over a loader close a window."""
    model, loader = accelerator.prepare(linear(), DataLoader(range(batches * accelerator.num_processes)))
    closed = []
    for _ in loader:
        with accelerator.accumulate(model):
            closed.append(accelerator.sync_gradients)
    return closed


def test_a_window_closes_every_so_many_steps_and_at_the_end_of_the_data() -> None:
    assert windows(Accelerator(gradient_accumulation_steps=2), 5) == [False, True, False, True, True]


def test_windows_can_go_on_into_the_next_epoch() -> None:
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    )
    assert windows(accelerator, 3) + windows(accelerator, 3) == [False, True, False, True, False, True]


def test_the_number_of_steps_can_be_changed() -> None:
    accelerator = Accelerator()
    accelerator.gradient_accumulation_steps = 3
    assert windows(accelerator, 6) == [False, False, True, False, False, True]
    with pytest.raises(TrainError, match="over 0 steps"):
        accelerator.gradient_accumulation_steps = 0


def test_a_window_s_gradient_is_the_mean_of_its_passes() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = accelerator.prepare(linear())
    for value in (1.0, 2.0, 3.0, 6.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[value]])).sum())
    assert model.weight.grad.item() == 3.0


def test_clipping_scales_to_the_norm_and_returns_the_norm_before() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(linear())
    accelerator.backward(model(torch.tensor([[4.0]])).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 4.0
    assert model.weight.grad.item() == pytest.approx(1.0, abs=1e-5)
    accelerator.clip_grad_value_(model.weight, 0.25)
    assert model.weight.grad.item() == 0.25


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_inside_a_window_the_norm_is_measured_and_nothing_clipped(precision: str) -> None:
    handlers = [GradScalerKwargs(init_scale=8.0)]
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision, kwargs_handlers=handlers)
    model = linear()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    norms = []
    for value in (2.0, 4.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[value]])).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.5).item())
            accelerator.clip_grad_value_(model.parameters(), 1.25)
            optimizer.step()
    assert norms == [1.0, 3.0]
    assert model.weight.item() == pytest.approx(1.0 - 1.25, abs=1e-4)


def test_gradients_of_fp16_are_unscaled_once() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model = linear()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.tensor([[2.0]])).sum())
    accelerator.unscale_gradients(optimizer)
    accelerator.unscale_gradients()
    assert model.weight.grad.item() == 2.0


def test_autocast_computes_in_the_precision_unless_told_otherwise() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    x = torch.ones(2, 2)
    with accelerator.autocast():
        assert (x @ x).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (x @ x).dtype == torch.float32


def test_a_profile_is_left_in_the_folder(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=traces)])
    with accelerator.profile() as profiler:
        torch.ones(2) + 1
    assert profiler.key_averages()
    assert json.loads((traces / "profile_0.json").read_text())["traceEvents"]
    with (
        pytest.raises(TrainError, match="unknown profiler activity 'gpu'"),
        accelerator.profile(ProfileKwargs(activities=["gpu"])),
    ):
        pass


def test_lomo_needs_its_optimizer() -> None:
    accelerator = Accelerator()
    with pytest.raises(TrainError, match="LOMO"):
        accelerator.lomo_backward(torch.ones(()), 0.1)

    class Lomo(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
            self.calls: Any = (loss, lr)

    bare = Lomo([nn.Parameter(torch.ones(1))], lr=0.1)
    accelerator.prepare(bare)
    accelerator.lomo_backward(torch.ones(()), 0.5)
    assert bare.calls == (torch.ones(()), 0.5)


def test_sequences_are_not_split() -> None:
    with Accelerator().maybe_context_parallel(buffers=[torch.ones(2)], buffer_seq_dims=[0]):
        pass


@on_ranks
def test_gradients_are_communicated_when_the_window_closes() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(linear())
    rank = PartialState().process_index
    for expected in ([[0.5], [1.0]], [[1.5], [1.5]]):  # (1 + 1) / 2 and (2 + 2) / 2: each alone, then their mean
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[rank + 1.0]])).sum())
        assert gather(model.module.weight.grad).tolist() == expected


@on_ranks
def test_gradients_can_be_communicated_at_every_pass() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(linear())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor([[PartialState().process_index + 1.0]])).sum())
    assert gather(model.module.weight.grad).tolist() == [[0.75], [0.75]]


@on_ranks
def test_a_sync_can_be_triggered_in_a_backward_whose_forward_was_local() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(linear())
    with accelerator.no_sync(model):
        loss = model(torch.tensor([[PartialState().process_index + 1.0]])).sum()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
    assert gather(model.module.weight.grad).tolist() == [[1.5], [1.5]]


@on_ranks
def test_uneven_inputs_can_be_joined() -> None:
    accelerator = Accelerator()
    model, loader = accelerator.prepare(linear(), DataLoader(range(3)))
    steps = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            accelerator.backward(model(batch[:, None].float()).sum())
            steps += 1
    assert gather_object([steps]) == [2, 1]
    assert len(list(loader)) == 2


@on_ranks
def test_both_processes_clip_by_one_norm() -> None:
    fresh_states()
    accelerator = Accelerator()
    model = accelerator.prepare(linear())
    accelerator.backward(model(torch.tensor([[PartialState().process_index * 8.0]])).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
    assert gather(norm).tolist() == [4.0, 4.0]


class Numbers(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


def test_a_loader_is_as_it_was_afterwards_also_after_an_error() -> None:
    loader = prepare_data_loader(DataLoader(TensorDataset(torch.arange(5)), batch_size=2), None, 2, 1)
    with pytest.raises(ValueError, match="stop"), uneven_batches([loader], False):
        assert [len(batch[0]) for batch in loader] == [2]
        raise ValueError("stop")
    assert [len(batch[0]) for batch in loader] == [2, 2]
    with uneven_batches([loader], None):
        assert len(list(loader)) == 2


def test_loaders_of_streams_are_warned_about() -> None:
    loader = prepare_data_loader(DataLoader(Numbers()))
    with pytest.warns(UserWarning, match="only supported for map-style datasets"), uneven_batches([loader], False):
        pass


def test_models_that_no_process_has_whole_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.FSDP)
    warns = pytest.warns(UserWarning, match="only supported for multi-GPU and multi-CPU training")
    with warns, accelerator.join_uneven_inputs([linear()], even_batches=False):
        pass
