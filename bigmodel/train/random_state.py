"""The states of the random number generators of this process."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch


def host_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's CPU generators, as tensors, numbers and tuples."""
    name, keys, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }


def set_host_state(state: dict[str, Any]) -> None:
    """Take back what `host_state` gave."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])


def full_state() -> dict[str, Any]:
    """Return `host_state` and the states of the accelerators' generators."""
    state = host_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_full_state(state: dict[str, Any]) -> None:
    """Take back what `full_state` gave; generators of devices that are not here are left alone."""
    set_host_state(state)
    if "cuda" in state and torch.cuda.is_available():
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
