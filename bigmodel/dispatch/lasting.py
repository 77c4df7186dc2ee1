"""Tensors that are made in the middle of something and outlive it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..devices import HOST


@contextmanager
def for_later() -> Iterator[None]:
    """Make tensors that are used outside of the caller's inference mode too, and that lie on the host where no device
    is named, whatever the caller's default device."""
    with torch.inference_mode(False), torch.device(HOST):
        yield
