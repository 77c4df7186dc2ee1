"""Which stage each module is in, of a model whose parts are all resident on one of several accelerators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ...devices import torch_device
from ...plan import Plan
from ...plan.result.stages import stage_runs
from ..transfer.stages import StagePipeline
from .attached_forward import AttachedForward
from .dispatched import Dispatched
from .micro_batches import MicroBatches


def divide_batches(model: nn.Module, plan: Plan, result: Dispatched) -> None:
    """Have the forward of a model in stages computed in micro-batches, as soon as any are asked for."""
    if stage_runs(plan):
        root = result.forward_of("", model)
        result.micro_batches = root.compute = MicroBatches(root, plan.micro_batch_size)


def mark_stages(plan: Plan, result: Dispatched) -> None:
    """Give `result` the stages of a plan, if it has several, and the attachments of its parts their numbers."""
    runs = stage_runs(plan)
    if not runs:
        return
    devices: list[torch.device] = []
    for device, names in runs:
        for own in _stages_of(names, result.attachments):
            for forward in own:
                forward.stage = len(devices)
            devices.append(torch_device(device))
    result.stages = StagePipeline(devices, result.main_device)
    if result.micro_batches is not None:
        # Its own: a server may have steps in flight meanwhile.
        result.micro_batches.pipeline = StagePipeline(devices, result.main_device, result.stages.times)


def _stages_of(names: Sequence[str], attachments: Mapping[str, AttachedForward]) -> Iterator[list[AttachedForward]]:
    """Yield the attachments of one run of parts, as stages.

    A part without parameters, such as rotary embeddings, is a stage of its own: a given device map does not say when
    it is called, and a step in a stage with later layers would wait for the one before to leave these.
    """
    run: list[AttachedForward] = []
    for forward in [attachments[name] for name in names if name in attachments]:
        if next(forward.module.parameters(), None) is None:
            yield [forward]
        else:
            run.append(forward)
    if run:
        yield run
