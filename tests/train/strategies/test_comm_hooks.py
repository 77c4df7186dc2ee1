"""Gradient compression on the way between processes."""

from __future__ import annotations

import pytest

from bigmodel.errors import TrainError
from bigmodel.train import DDPCommunicationHookType as Kind
from tests.train.multiprocess import on_ranks
from tests.train.strategies.test_ddp import gradients


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


@on_ranks
def test_what_the_process_group_cannot_exchange_is_an_error() -> None:
    with pytest.raises(TrainError, match="comm_hook bf16 in no cannot be used: BF16 all reduce"):
        gradients([1, 1], comm_hook="bf16")
