"""The plan of a model whose activations the first forward has measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from ...devices import DISK, HOST
from ...errors import BudgetError
from ...limits import DEFAULT_SLOTS
from ...plan import STRATEGIES, Plan, plan
from ...plan.result.budgets import Key, device_type_of, is_accelerator, without_unknown_share
from ...profile import profile_model
from ...profile.model.tensors import owner_of
from ...profile.trace.measured import MeasuredForward
from ..weights.fused_view import lies_on_disk
from .resolve import ResolvedMap, map_of_plan


def plan_measured(model: nn.Module, guarded: ResolvedMap, measured: MeasuredForward) -> Plan:
    """Return the plan of `model` under the budgets of its guarded plan, now that its activations are known.

    Args:
        model: The model, dispatched by `guarded`.
        guarded: Its map, with a plan that is `Plan.guarded`.
        measured: The activations of a forward by that plan.

    Returns:
        A plan with a better placement; where there is none, the guarded plan with what was measured.
    """
    before, asked = guarded.plan, guarded.arguments
    budgets = {key: device.budget for key, device in before.devices.items() if device.budget is not None}
    profile = profile_model(
        model,
        before.batch_size,
        before.context_length,
        before.new_tokens,
        before.dtype,
        asked.no_split_module_classes,
        device_type=device_type_of(budgets),
        measured=measured,
        host_kernels=before.host_kernels,
        padded=before.padded,
        prefill_chunk_size=before.prefill_chunk_size,
    )
    for allowed, slots in _from_roomy_to_tight(budgets):
        try:
            found = plan(
                profile,
                {key: size for key, size in allowed.items()},  # noqa: C416 (a mapping's keys are invariant)
                before.strategy if before.strategy in STRATEGIES else "auto",
                main_device=before.main_device,
                offload_buffers=before.offload_buffers,
                offload_dtype=before.offload_dtype,
                slots=slots,
                expert_cache=asked.expert_cache,
                pinned_memory=before.pinned_memory,
                objective=None if asked.offload in (None, "stream") else "latency",
                offload=asked.offload or "stream",
            )
        except BudgetError:
            continue
        if is_accelerator(found.main_device):
            devices = {key: replace(device, budget=before.devices[key].budget) for key, device in found.devices.items()}
            return replace(found, devices=devices, resident_limit=before.resident_limit)
    return corrected_plan(before, measured)


def _from_roomy_to_tight(budgets: Mapping[Key, int]) -> Iterator[tuple[Mapping[Key, int], int]]:
    """Yield budgets and slots to plan with: first so that larger inputs have room too, last what the guard had."""
    yield without_unknown_share(budgets), DEFAULT_SLOTS
    yield budgets, DEFAULT_SLOTS
    yield budgets, 1


def kept_in_memory(model: nn.Module, resolved: ResolvedMap) -> ResolvedMap:
    """Return a map by which weights that lie in memory stay there, also those that it has on disk.

    While activations are unknown nearly all weights are off the accelerators. That must not ask for files of a model
    that was built in memory, most of which will be on accelerators.
    """
    on_disk = {each.name for each in resolved.placement.tensors(model) if each.storage_device == DISK}
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    in_memory = [name for name in on_disk if not tensors[name].is_meta and not lies_on_disk(tensors[name])]
    stay = {owner_of(name, resolved.devices) for name in in_memory}
    parts = tuple(replace(part, device=HOST) if part.name in stay else part for part in resolved.plan.parts)
    return map_of_plan(model, replace(resolved.plan, parts=parts), resolved.arguments) if stay else resolved


def corrected_plan(before: Plan, measured: MeasuredForward) -> Plan:
    """Return a guarded plan with the activations that were measured, and the same placement."""
    main = before.devices[before.main_device]
    devices = {**before.devices, before.main_device: replace(main, activations=measured.peak)}
    return replace(before, devices=devices, guarded=False)
