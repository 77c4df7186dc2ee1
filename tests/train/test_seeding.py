"""Seeding, and saving and restoring generator states."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train import PartialState, set_seed, synchronize_rng_state, synchronize_rng_states
from bigmodel.train.collectives import gather, gather_object
from bigmodel.train.seeding import full_state, host_state, set_full_state, set_host_state
from tests.train.multiprocess import on_ranks


def draws() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_all_three_generators_are_seeded() -> None:
    set_seed(5)
    first = draws()
    set_seed(5)
    assert draws() == first
    set_seed(6)
    assert draws() != first


def test_deterministic_algorithms_can_be_demanded() -> None:
    try:
        set_seed(5, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_mistakes_are_named() -> None:
    with pytest.raises(TrainError, match="needs the generator"):
        synchronize_rng_state("generator")
    with pytest.raises(TrainError, match="unknown generator type 'dice'"):
        synchronize_rng_state("dice")


@on_ranks
def test_processes_draw_alike_or_apart_as_asked() -> None:
    set_seed(5)
    assert len(set(gather_object([draws()]))) == 1
    set_seed(5, device_specific=True)
    assert len(set(gather_object([draws()]))) == 2


@on_ranks
def test_generators_are_synchronised_with_process_0() -> None:
    rank = PartialState().process_index
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["torch", "generator"], generator)
    assert gather(torch.rand(1)).unique().numel() == 1
    assert gather(torch.rand(1, generator=generator)).unique().numel() == 1


def all_draws() -> list[float]:
    np.random.normal()  # leaves a cached second value behind, which is part of the state
    random.gauss(0, 1)
    return [random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(()).item()]


def test_the_host_s_generators_repeat_themselves() -> None:
    all_draws()
    state = host_state()
    first = all_draws()
    assert all_draws() != first
    set_host_state(state)
    assert all_draws() == first


def test_the_full_state_survives_a_file_without_pickled_objects(tmp_path: Path) -> None:
    state = full_state()
    first = all_draws()
    torch.save(state, tmp_path / "state")
    set_full_state(torch.load(tmp_path / "state", weights_only=True))
    assert all_draws() == first


def test_a_worker_whose_parent_uses_cuda_does_without_its_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", refuse)
    assert "cuda" not in full_state()
