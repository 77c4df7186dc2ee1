"""DeepSpeed on two CPU processes gives the loss curve of one, and goes on bitwise from its checkpoint. Two models may
have a plugin each."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from tests.examples import alike
from tests.train.multiprocess import run_on_ranks
from tests.train.strategies.conftest import DEEPSPEED, TOLERANCE

from .two_models import made, rounds, train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install bigmodel[deepspeed]"
)


@pytest.mark.slow
@alike("name", ["zero_3", "zero_1", "zero_0", "zero_2_offload", "zero_3_offload"], first=1)
def test_the_curve_is_that_of_one_process(name: str, check_curve: Callable[[str], None]) -> None:
    check_curve(name)


def alone(seed: int) -> list[float]:
    """The losses of a model that is trained by PyTorch alone."""
    model, optimizer = made(seed)
    found = []
    for x, y in rounds():
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("accelerators", [1, 2])
def test_two_models_are_trained_with_the_plugins_that_were_selected(accelerators: int, tmp_path: Path) -> None:
    run_on_ranks(train, tmp_path, accelerators, modules=DEEPSPEED)
    losses, names = json.loads((tmp_path / "losses.json").read_text())
    assert [list(each) for each in zip(*losses, strict=True)] == [
        pytest.approx(alone(seed), rel=TOLERANCE) for seed in (0, 1)
    ]
    assert names == [sorted(made(0)[0].state_dict())] * 2
