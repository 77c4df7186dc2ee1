"""Debug mode says which process's tensors differ, before anything hangs."""

from __future__ import annotations

import pytest
import torch

from bigmodel.train import PartialState
from bigmodel.train.operations.checks import DistributedOperationException
from bigmodel.train.operations.collectives import gather
from tests.train.multiprocess import on_ranks


@on_ranks
def test_different_shapes_are_reported_for_each_process() -> None:
    state = PartialState()
    state.debug = True
    try:
        with pytest.raises(DistributedOperationException, match=r"(?s)gather.*process 0.*\[1\].*process 1.*\[2\]"):
            gather(torch.ones(state.process_index + 1))
        assert gather(torch.ones(2)).shape == (4,)
    finally:
        state.debug = False


def test_the_mode_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    assert PartialState().debug
