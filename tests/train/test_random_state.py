"""The states of generators can be kept and taken back."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from bigmodel.train.random_state import full_state, host_state, set_full_state, set_host_state


def draws() -> list[float]:
    np.random.normal()  # leaves a cached second value behind, which is part of the state
    random.gauss(0, 1)
    return [random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(()).item()]


def test_the_host_s_generators_repeat_themselves() -> None:
    draws()
    state = host_state()
    first = draws()
    assert draws() != first
    set_host_state(state)
    assert draws() == first


def test_the_full_state_survives_a_file_without_pickled_objects(tmp_path: Path) -> None:
    state = full_state()
    first = draws()
    torch.save(state, tmp_path / "state")
    set_full_state(torch.load(tmp_path / "state", weights_only=True))
    assert draws() == first
