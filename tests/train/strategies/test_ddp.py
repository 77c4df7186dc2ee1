"""DistributedDataParallel through the Accelerator, with gradient compression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator, DistributedDataParallelKwargs
from bigmodel.train import DDPCommunicationHookType as Kind
from tests.train.multiprocess import fresh_states, on_ranks, start_ranks

LEFT_ALONE = """
import atexit
import torch.distributed as dist

model = None
atexit.register(lambda: print("in a group at the end:", dist.is_initialized(), hasattr(model, "reducer")))
import torch
from bigmodel.train import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 2)).sum())
"""


@pytest.mark.slow
def test_a_script_that_ends_without_a_word_leaves_the_group_before_python_ends() -> None:
    ranks = start_ranks(["-c", LEFT_ALONE])
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert outputs == [("in a group at the end: False False\n", "")] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]


def gradients(rows: list[int], **kwargs: Any) -> tuple[TorchDDP, torch.Tensor]:
    """Return a wrapped model, and its gradients after this process has seen as many rows as `rows` says."""
    fresh_states()
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**kwargs)])
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(16, 16))
    x = torch.linspace(-1, 1, 16).repeat(rows[accelerator.process_index], 1)
    accelerator.backward(model(x).square().sum())
    return model, model.module.weight.grad.clone()


@on_ranks
def test_arguments_reach_pytorch_s_wrapper() -> None:
    model, _ = gradients([1, 1], bucket_cap_mb=3, gradient_as_bucket_view=True, static_graph=True)
    assert isinstance(model, TorchDDP)
    assert model.bucket_bytes_cap == 3 * 2**20
    assert model.gradient_as_bucket_view
    assert model.static_graph


@on_ranks
def test_a_sync_can_be_asked_for_after_a_local_forward() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), float(accelerator.process_index + 1))
    with accelerator.no_sync(model):
        loss = model(x).sum()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    assert model.module.weight.grad.tolist() == [[1.5, 1.5]]


@on_ranks
def test_processes_may_run_out_of_batches_one_after_the_other() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 1))
    steps = 2 + accelerator.process_index
    with accelerator.join_uneven_inputs([model]):
        for _ in range(steps):
            accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.wait_for_everyone()


@pytest.mark.parametrize("evaluation_mode", [True, False])
def test_one_process_needs_no_wrapper(evaluation_mode: bool) -> None:
    assert not isinstance(Accelerator().prepare_model(nn.Linear(1, 1), evaluation_mode=evaluation_mode), TorchDDP)


@pytest.mark.slow
def test_the_curve_is_that_of_one_process(check_curve: Callable[[str], None]) -> None:
    check_curve("ddp")


@pytest.mark.slow
@on_ranks
def test_gradients_of_a_compiled_model_stay_local_in_the_middle_of_a_window() -> None:
    fresh_states()
    accelerator = Accelerator(dynamo_backend="eager", gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)
    seen = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 2), float(accelerator.process_index))).sum())
            seen.append(bare.weight.grad.tolist())
    rank = accelerator.process_index
    assert seen == [[[rank / 2, rank / 2]], [[0.5, 0.5]]]


@on_ranks
def test_compressed_gradients_are_close_to_the_exact_ones() -> None:
    _, exact = gradients([1, 3])
    for hook, wrapper, limit in (
        (Kind.FP16, Kind.NO, 1e-3),
        (Kind.POWER_SGD, Kind.NO, 1e-4),
        (Kind.BATCHED_POWER_SGD, Kind.FP16, 1e-3),
    ):
        options = {} if hook is Kind.FP16 else {"start_powerSGD_iter": 2}
        _, found = gradients([1, 3], comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options)
        error = float((found - exact).abs().max() / exact.abs().max())
        assert error < limit, f"{hook} in {wrapper}"
        assert error > 0 or wrapper is Kind.NO, f"{hook} in {wrapper}: nothing was compressed"


@pytest.mark.skipif(bool(torch.version.cuda), reason="PyTorch with CUDA exchanges bf16")
@on_ranks
def test_what_the_process_group_cannot_exchange_is_an_error() -> None:
    with pytest.raises(TrainError, match="comm_hook bf16 in no cannot be used: BF16 all reduce"):
        gradients([1, 1], comm_hook="bf16")
