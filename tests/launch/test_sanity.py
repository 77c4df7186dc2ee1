"""The bundled check, as `bigmodel test` runs it."""

from __future__ import annotations

import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.launch import sanity
from bigmodel.train import Accelerator
from tests.train.new_states import new_states as new_states

from .conftest import Forked


@pytest.mark.slow
def test_every_check_passes_on_three_processes(forked: Forked) -> None:
    assert forked.outcomes["sanity"] == ""


def test_every_check_passes_on_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    sanity.main()
    assert capsys.readouterr().out.splitlines()[-1] == "The configuration works."


def test_a_sum_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    sanity.check_collectives(accelerator)
    monkeypatch.setattr(accelerator, "reduce", lambda tensor, kind: tensor + 1)
    with pytest.raises(TrainError, match="bigmodel test: reduce gave"):
        sanity.check_collectives(accelerator)


def test_samples_that_are_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "gather_for_metrics", lambda batch: batch[:-1])
    with pytest.raises(TrainError, match="samples were read instead of 61"):
        sanity.check_data(accelerator)


def test_training_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    right = accelerator.get_state_dict
    monkeypatch.setattr(
        accelerator, "get_state_dict", lambda model: {k: v + torch.full_like(v, 0.1) for k, v in right(model).items()}
    )
    with pytest.raises(TrainError, match=r"differs by 1\.0e-01 from training in one process"):
        sanity.check_training(accelerator)
