"""Setting seeds, and keeping generators in step across processes."""

from __future__ import annotations

import random
from collections.abc import Iterable

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
    """Give every process the state that one generator has on process 0.

    Raises TrainError for "generator" without a generator, or an unknown type.
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
    else:
        torch.set_rng_state(_shared(torch.get_rng_state()))


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Give every process the states that these generators have on process 0."""
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
