"""Random number generators: seeds, saved states, and synchronisation across processes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from bigmodel.errors import TrainError
from bigmodel.train.state.partial import PartialState
from bigmodel.train.types import RNGType


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and PyTorch's generators.

    Args:
        seed: the seed.
        device_specific: add the process's number, so that processes draw different numbers.
        deterministic: also allow only deterministic algorithms (`torch.use_deterministic_algorithms`).
    """
    if device_specific:
        seed += PartialState().process_index
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Set one generator on every process to its state on process 0.

    Raises:
        TrainError: the type is "generator" without a `generator`, unknown, or of a device that is not supported.
    """
    state = PartialState()
    kind = _kind(rng_type)
    if kind == RNGType.GENERATOR and generator is None:
        raise TrainError("synchronising 'generator' needs the generator")
    if not state.use_distributed:
        return
    if kind == RNGType.GENERATOR and generator is not None:
        generator.set_state(_shared(generator.get_state()))
    elif kind == RNGType.CUDA:
        torch.cuda.set_rng_state(_shared(torch.cuda.get_rng_state()))
    elif kind == RNGType.MPS:
        torch.mps.set_rng_state(_shared(torch.mps.get_rng_state()))
    elif kind == RNGType.TORCH:
        torch.set_rng_state(_shared(torch.get_rng_state()))
    else:
        raise TrainError(f"{kind} devices are not supported, and so are their generators")


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Set these generators on every process to their states on process 0."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def _kind(rng_type: RNGType | str | None) -> RNGType:
    try:
        return RNGType(rng_type if rng_type is not None else "torch")
    except ValueError:
        raise TrainError(f"unknown generator type {rng_type!r}; choose among {RNGType.list()}") from None


def _shared(rng_state: torch.Tensor) -> torch.Tensor:
    device = PartialState().device
    moved = rng_state.to(device)
    dist.broadcast(moved, src=0)
    return moved.cpu()


def host_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's CPU generators, as tensors, numbers and tuples."""
    name, keys, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }


def set_host_state(state: dict[str, Any]) -> None:
    """Restore the states that `host_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])


def full_state() -> dict[str, Any]:
    """Return `host_state` and the states of the accelerators' generators."""
    state = host_state()
    # A forked process, such as a data loader's worker, cannot ask for them if its parent has used CUDA.
    if torch.cuda.is_available() and not torch.cuda._is_in_bad_fork():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_full_state(state: dict[str, Any]) -> None:
    """Restore the states that `full_state` returned; those of absent devices are ignored."""
    set_host_state(state)
    if "cuda" in state and torch.cuda.is_available():
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
