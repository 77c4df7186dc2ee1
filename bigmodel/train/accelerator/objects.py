"""What people give to `prepare`: telling one kind from another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from bigmodel.train.scheduler import AcceleratedScheduler


def those(kind: type[Any], objects: Sequence[Any]) -> list[Any]:
    """Return those of `objects` that are of one kind."""
    return [obj for obj in objects if isinstance(obj, kind)]


def is_model(obj: Any) -> bool:
    """Whether it is a model."""
    return isinstance(obj, nn.Module)


def is_loader(obj: Any) -> bool:
    """Whether it is a data loader."""
    return isinstance(obj, DataLoader)


def is_optimizer(obj: Any) -> bool:
    """Whether it is an optimizer."""
    return isinstance(obj, torch.optim.Optimizer)


def is_scheduler(obj: Any) -> bool:
    """Whether it is a scheduler, or at least behaves like one."""
    return isinstance(obj, LRScheduler) or (
        not isinstance(obj, (AcceleratedScheduler, torch.optim.Optimizer, nn.Module, DataLoader))
        and all(hasattr(obj, name) for name in ("step", "state_dict", "load_state_dict", "get_last_lr"))
    )


ORDER: tuple[Callable[[Any], bool], ...] = (is_loader, is_model, is_optimizer)
"""The order in which kinds are prepared; schedulers follow last, for they look for their optimizers."""
