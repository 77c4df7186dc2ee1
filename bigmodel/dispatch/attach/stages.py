"""Which stage each module is in, of a model whose parts are all resident on one of several accelerators."""

from __future__ import annotations

from ...devices import torch_device
from ...plan import Plan
from ...plan.result.stages import stage_runs
from ..transfer.stages import StagePipeline
from .dispatched import Dispatched


def mark_stages(plan: Plan, result: Dispatched) -> None:
    """Give `result` the stages of a plan, if it has several, and the attachments of its parts their numbers."""
    runs = stage_runs(plan)
    if not runs:
        return
    for number, (_, names) in enumerate(runs):
        for name in names:
            if name in result.attachments:
                result.attachments[name].stage = number
    result.stages = StagePipeline([torch_device(device) for device, _ in runs], result.main_device)
