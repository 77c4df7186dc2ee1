"""Whether an engine has several steps in flight: where its model's stages, its runner and its options go together."""

from __future__ import annotations

import logging

import torch

from bigmodel.devices import format_size, normalize_device
from bigmodel.devices.memory import caching_memory
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.errors import ServeError
from bigmodel.plan import Plan
from bigmodel.server.engine.budget import EngineOptions
from bigmodel.server.engine.compute.draft import Drafter
from bigmodel.server.engine.compute.media import takes_images
from bigmodel.server.engine.compute.runner import PackedRunner, Runner
from bigmodel.server.engine.in_flight import InFlight

logger = logging.getLogger(__name__)


def steps_in_flight(
    model: torch.nn.Module, runner: Runner, drafter: Drafter | None, options: EngineOptions
) -> InFlight | None:
    """Return how an engine has several steps in flight: as many as the model's plan predicts to be worth it, or as many
    as the options say; None for one at a time.

    Raises:
        ServeError: The options ask for several, and the model has one stage, or something that does not go with them.
    """
    asked = options.steps_in_flight
    found = dispatched(model)
    if found is None or found.stages is None:
        if asked is not None and asked > 1:
            raise ServeError(
                f"{asked} steps in flight need parts that are all resident on one of several accelerators, with their "
                "keys and values"
            )
        return None
    predicted = found.plan.stages
    if asked == 1 or (asked is None and (predicted is None or predicted.least_tokens() is None)):
        return None
    if asked is None:
        most = _with_room(found.plan, found.stages.devices, 1 if predicted is None else predicted.most)
    else:
        most = asked
    refused = _refusal(model, runner, drafter) or _no_room(found.plan, found.stages.devices, most)
    if refused is not None:
        if asked is not None:
            raise ServeError(f"{asked} steps in flight do not go together with {refused}")
        logger.warning("one step is computed at a time, as several in flight do not go together with %s", refused)
        return None
    if asked is None and predicted is not None:
        return InFlight(found.stages, most, predicted.steps)
    return InFlight(found.stages, most, lambda _tokens: most)


def _refusal(model: torch.nn.Module, runner: Runner, drafter: Drafter | None) -> str | None:
    """What does not go together with several steps in flight; None: nothing."""
    if not isinstance(runner, PackedRunner):
        return "sequences that are computed one by one"
    if runner.mixers is not None:
        return "recurrent states"
    if drafter is not None:
        return "proposed tokens, which are chosen after one step and before the next"
    return "images" if takes_images(model) else None


def _with_room(plan: Plan, devices: tuple[torch.device, ...], most: int) -> int:
    """Return the number of steps for whose workspaces all devices have memory: `most`, or fewer; at least 2."""
    return next((steps for steps in range(most, 2, -1) if _no_room(plan, devices, steps) is None), 2)


def _no_room(plan: Plan, devices: tuple[torch.device, ...], most: int) -> str | None:
    """Which device lacks memory for the workspaces of so many streams, of which a plan counts one; None: none."""
    entries = {normalize_device(key): entry for key, entry in plan.devices.items()}
    for device in dict.fromkeys(devices):
        memory, entry = caching_memory(str(device)), entries.get(str(device))
        if memory is None or entry is None or entry.free is None:
            continue
        needed = most * memory.workspace
        if needed > entry.free:
            return (
                f"the {format_size(entry.free)} that the plan leaves free on {device}, where the libraries' workspaces "
                f"of their streams take {format_size(needed)}"
            )
    return None
