"""What a plan allows an engine: sequences at once, tokens of a step, bytes of keys and values per device.

The planner counts keys and values of whole contexts beside weights and activations, and says how many sequences
there is room for. The engine asks it and counts nothing again, so admission and placement cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from bigmodel.devices import format_size, free_memory_bytes, normalize_device
from bigmodel.errors import ServeError
from bigmodel.server.engine.attention import PROMPT_BLOCK
from bigmodel.server.engine.options import DEFAULT_SEQUENCES, EngineOptions
from bigmodel.server.engine.pool import KVBudget

DEFAULT_SHARE = 0.25  # of a device's free memory, for keys and values, when no plan says how much


class HoldsKV(Protocol):
    """Whatever keeps keys and values: the runner, and what guesses with a draft model."""

    def bytes_per_token(self) -> dict[str, int]: ...


def sequences_at_once(plan: Any, options: EngineOptions) -> int:
    """How many sequences run at once: what the options say, else what the plan has room for, within the default.

    Never fewer than the plan was made for. Without a plan, or without a budget in it, the default.
    """
    if options.max_sequences is not None:
        return options.max_sequences
    if plan is None:
        return DEFAULT_SEQUENCES
    return int(max(plan.batch_size, min(DEFAULT_SEQUENCES, plan.max_sequences() or plan.batch_size)))


def tokens_of_a_step(plan: Any, options: EngineOptions) -> int:
    """How many tokens a step computes: what the options say, within those that the plan's activations are of.

    Never so few that a prompt could wait for ever behind sequences that decode.
    """
    planned = 0 if plan is None else plan.batch_size * plan.context_length
    wanted = min(options.max_batch_tokens, planned or options.max_batch_tokens)
    return max(wanted, sequences_at_once(plan, options) + PROMPT_BLOCK)


def kv_budget(holders: Seq[HoldsKV], plan: Any, options: EngineOptions) -> KVBudget:
    """Bytes for keys and values per device: what the options say, else the plan, else a share of what is free.

    Raises ServeError when the options ask for more than the plan leaves on a device: its budget would not hold.
    """
    per_token: dict[str, int] = {}
    for holder in holders:
        for device, size in holder.bytes_per_token().items():
            per_token[device] = per_token.get(device, 0) + size
    entries = plan_devices(plan)
    share = _share(plan, options)
    return KVBudget(per_token, {device: _kv_bytes(device, entries.get(device), share, options) for device in per_token})


def plan_devices(plan: Any) -> dict[str, Any]:
    """The plan's entry of each device, by canonical device name; empty without a plan."""
    devices = getattr(plan, "devices", None)
    if not devices:
        return {}
    entries = devices.items() if isinstance(devices, Mapping) else [(entry.device, entry) for entry in devices]
    return {normalize_device(device): entry for device, entry in entries}


def _share(plan: Any, options: EngineOptions) -> float:
    """How often the planned keys and values are held: once for each batch that the plan was made for."""
    if plan is None or not plan.batch_size:
        return 1.0
    room = plan.max_sequences() or plan.batch_size
    return max(plan.batch_size, min(room, sequences_at_once(plan, options))) / plan.batch_size


def _kv_bytes(device: str, entry: Any, share: float, options: EngineOptions) -> int:
    """Bytes for keys and values on ``device``, of which the plan says ``entry`` (None: nothing)."""
    planned = 0 if entry is None else int(entry.kv_cache)
    if options.kv_bytes is None:
        return int(planned * share) or int(free_memory_bytes(device) * DEFAULT_SHARE)
    if entry is not None and entry.free is not None and options.kv_bytes > planned + entry.free:
        raise ServeError(
            f"{format_size(options.kv_bytes)} for keys and values are more than the plan leaves on {device}: "
            f"{format_size(max(0, planned + entry.free))} of its {format_size(entry.budget)}; ask for less, for fewer "
            "or shorter sequences, or give the device a larger budget"
        )
    return options.kv_bytes
