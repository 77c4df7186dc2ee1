"""The Accelerator's collectives and trigger."""

from __future__ import annotations

import torch

from bigmodel.train import Accelerator
from tests.train.multiprocess import on_ranks


@on_ranks
def test_what_processes_tell_each_other() -> None:
    accelerator = Accelerator()
    rank = accelerator.process_index
    own = torch.tensor([float(rank)])
    assert accelerator.gather(own).tolist() == [0.0, 1.0]
    assert accelerator.gather_for_metrics(["a", rank]) == ["a", 0, "a", 1]
    assert accelerator.reduce(own).item() == 1.0
    assert accelerator.reduce(own, "mean", scale=4.0).item() == 2.0
    padded = accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=-1)
    assert padded.tolist() == [[1.0, -1.0], [1.0, 1.0]][rank]


@on_ranks
def test_a_flag_raised_by_one_is_seen_by_all_and_lowered() -> None:
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def test_one_process_sees_its_own_flag() -> None:
    accelerator = Accelerator()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
