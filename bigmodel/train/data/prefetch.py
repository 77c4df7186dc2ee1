"""Copying batches to the device, one ahead of the one being computed with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bigmodel.devices import copy_stream
from bigmodel.train.data.steps import Step
from bigmodel.train.operations.nested import find_tensors, send_to_device


def move_each(steps: Iterator[Step], device: torch.device, non_blocking: bool) -> Iterator[Step]:
    """Yield the steps with their batches on `device`, each copied when it is asked for."""
    for step in steps:
        yield step._replace(batch=send_to_device(step.batch, device, non_blocking=non_blocking))


def move_ahead(steps: Iterator[Step], device: torch.device) -> Iterator[Step]:
    """Yield the steps with their batches on `device`; the next one is being copied beside the compute."""
    stream = copy_stream(device)

    def begin(step: Step) -> tuple[list[Step], Any]:
        moved: list[Step] = []
        event = stream.submit(
            lambda: moved.append(step._replace(batch=send_to_device(step.batch, device, non_blocking=True)))
        )
        return moved, event

    following = next(steps, None)
    pending = begin(following) if following is not None else None
    try:
        while pending is not None:
            current, following = pending, next(steps, None)
            pending = begin(following) if following is not None else None
            moved, event = current
            event.wait()
            _keep_until_used(moved[0].batch, device)
            yield moved[0]
    finally:
        if pending is not None:
            pending[1].synchronize()


def _keep_until_used(batch: Any, device: torch.device) -> None:
    """Tell the allocator that the compute stream uses what was allocated on the copy stream."""
    if device.type in ("cuda", "xpu"):
        current = torch.get_device_module(device.type).current_stream(device)
        for tensor in find_tensors(batch):
            if tensor.device.type == device.type:
                tensor.record_stream(current)
