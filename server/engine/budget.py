"""Limits of an engine: concurrent sequences, tokens of a step, bytes of keys and values. All are read from the plan.

The planner counts keys and values of whole contexts in addition to weights and activations, and computes for how many
sequences there is memory. The engine uses its numbers, so admission and placement cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Protocol

from bigmodel.devices import DISK, HOST, format_size, free_memory_bytes, normalize_device
from bigmodel.errors import ServeError
from bigmodel.limits import KV_SHARE, KV_SPARE_PAGES
from bigmodel.plan.memory.host_kv import least_pages
from bigmodel.server.engine.compute.host_linear import HostLinear
from bigmodel.server.engine.kv.buffers import GROWTH, PROMPT_BLOCK

PREFIX_FOLDER_BYTES = 20 << 30
DEFAULT_SEQUENCES = 16  # at once, where the plan has memory for them


@dataclass(frozen=True)
class EngineOptions:
    """Limits and batching of the engine.

    Args:
        max_sequences: Sequences that run at once; None for :data:`DEFAULT_SEQUENCES`, or as many as the plan was made
            for or has memory for.
        max_batch_tokens: Tokens of one step; fewer if the plan was made for fewer, more if they are too few for the
            number of sequences.
        max_queue: Sequences that may wait in addition to the running ones.
        kv_bytes: Bytes for keys and values on every device; None: those of the plan, else a quarter of the free memory.
        max_length: Prompt plus output of one sequence, in tokens; None for the model's context.
        prefix_cache: Whether to keep keys and values of prompts for later ones.
        prefix_folder: Folder whose files keep them, too, beyond their memory and the process.
        prefix_folder_bytes: Most bytes of these files.
        row_multiple: Padding of packed rows, see :mod:`bigmodel.server.engine.compute.host_linear`; 1 is fastest for a
            single stream and gives up equal bits alone and in a batch.
        draft_tokens: Tokens that a draft model proposes in a step.
        prompt_lookup: Tokens that are proposed in a step by what followed the last ones earlier in the text; 0: none.
        host_linear: Library of float32 products on the host, see the same module.
        force_speculation: Whether tokens are proposed even where the plan predicts that this is slower.
        steps_in_flight: Steps that are computed at once where layers are resident on several accelerators; None: as
            many as the plan predicts to be worth it; 1: one at a time.
        kv_tokens: Most positions of keys and values, where other processes hold a part of them; None: any number.
    """

    max_sequences: int | None = None
    max_batch_tokens: int = 512
    max_queue: int = 128
    kv_bytes: int | None = None
    max_length: int | None = None
    prefix_cache: bool = True
    row_multiple: int | str = "auto"
    draft_tokens: int = 4
    host_linear: HostLinear = "auto"
    prompt_lookup: int = 0
    prefix_folder: Path | None = None
    prefix_folder_bytes: int = PREFIX_FOLDER_BYTES
    force_speculation: bool = False
    steps_in_flight: int | None = None
    kv_tokens: int | None = None


ANY_NUMBER = 2**30
"""Positions that take no memory."""


@dataclass(frozen=True)
class KVBudget:
    """Bytes for keys and values: ``bytes_per_token`` and ``bytes_total``, by device; ``on_disk`` are further bytes for
    those of the host that RAM cannot hold."""

    bytes_per_token: Mapping[str, int]
    bytes_total: Mapping[str, int]
    on_disk: int = 0

    @property
    def tokens(self) -> int:
        """Positions that fit every device's bytes, in whole growth steps; of a model whose layers all have states of
        fixed size, as many as anybody asks for. Raises ServeError when not even one step does."""
        fits = [self._of(device) // per for device, per in self.bytes_per_token.items() if per]
        if not fits:
            return ANY_NUMBER
        tokens = min(fits) // GROWTH * GROWTH
        if not tokens:
            device, per = min(self.bytes_per_token.items(), key=lambda item: self.bytes_total[item[0]] / (item[1] or 1))
            raise ServeError(
                f"{format_size(self.bytes_total[device])} for keys and values on {device} do not hold {GROWTH} tokens "
                f"of {format_size(per)} each; give more, or offload more weights"
            )
        return tokens

    def _of(self, device: str) -> int:
        """Bytes for keys and values of a device in all places; the disk has some pages that RAM has, too."""
        twice = KV_SPARE_PAGES * PROMPT_BLOCK * self.bytes_per_token[device]
        beyond = max(self.on_disk - twice, 0) if device == HOST else 0
        return self.bytes_total[device] + beyond

    @property
    def in_ram(self) -> int | None:
        """Positions of whole pages that RAM holds, where the disk has others; None where it has none."""
        if not self.on_disk:
            return None
        return self.bytes_total[HOST] // self.bytes_per_token[HOST] // PROMPT_BLOCK * PROMPT_BLOCK

    def without_states(self, states: StateRoom) -> tuple[KVBudget, int]:
        """What recurrent states leave, and how many of them the prefix cache may keep: at most for a quarter of the
        bytes.

        Raises:
            ServeError: A device cannot hold the states of so many sequences.
        """
        left = {device: nbytes - states.running.get(device, 0) for device, nbytes in self.bytes_total.items()}
        for device, nbytes in left.items():
            if nbytes < 0:
                raise ServeError(
                    f"{format_size(self.bytes_total[device])} for keys and values on {device} do not hold recurrent "
                    f"states of {states.rows} sequences, {format_size(states.each[device])} each; give more, or let "
                    "fewer run"
                )
        fit = (left.get(device, 0) // (4 * nbytes) for device, nbytes in states.each.items() if nbytes)
        kept = min(states.kept, *fit)
        total = {device: nbytes - kept * states.each.get(device, 0) for device, nbytes in left.items()}
        return KVBudget(self.bytes_per_token, total, self.on_disk), kept


@dataclass(frozen=True)
class StateRoom:
    """Recurrent states that an engine holds.

    Attributes:
        each: Bytes of those of one sequence, by device.
        moved: Bytes of those of one sequence and layer, likewise: as many are copied at a time, for each row, when
            other sequences are computed together.
        sequences: Sequences at once.
        rows: Sequences whose states there is memory for: they are computed together in a multiple of so many.
        kept: States that the prefix cache keeps at most.
    """

    each: Mapping[str, int]
    moved: Mapping[str, int]
    sequences: int
    rows: int
    kept: int

    @property
    def running(self) -> dict[str, int]:
        """Bytes of the states of all sequences, by device."""
        return {device: self.rows * nbytes + self._moved(device) for device, nbytes in self.each.items()}

    @property
    def unplanned(self) -> dict[str, int]:
        """Bytes beyond those of so many sequences, which a plan counts."""
        beyond = self.rows - self.sequences + self.kept
        return {device: beyond * nbytes + self._moved(device) for device, nbytes in self.each.items()}

    def _moved(self, device: str) -> int:
        return self.rows * self.moved.get(device, 0) if self.rows > 1 else 0


class KVOwner(Protocol):
    """An object that stores keys and values: the runner, the draft model."""

    def bytes_per_token(self) -> dict[str, int]: ...


def sequences_at_once(plan: Any, options: EngineOptions) -> int:
    """Sequences that run at once: the options' number, else what the plan has memory for, at most the default.

    Never fewer than the plan was made for. The default without a plan that counts keys and values.
    """
    if options.max_sequences is not None:
        return options.max_sequences
    if plan is None or not plan.context_length:
        return DEFAULT_SEQUENCES
    return int(max(plan.batch_size, min(DEFAULT_SEQUENCES, plan.max_sequences() or plan.batch_size)))


def planned_chunk(options: EngineOptions, batch_size: int) -> int:
    """Tokens of each of ``batch_size`` prompts in a forward, for a plan of the engine's steps: no whole prompts are
    computed at once."""
    most = max(options.max_batch_tokens, batch_size + PROMPT_BLOCK)
    return -(-most // batch_size)


def tokens_of_a_step(plan: Any, options: EngineOptions, in_ram: int | None = None) -> int:
    """Tokens of a step: the options' number, at most those that the plan's activations were counted for; and where the
    disk has keys and values, too, as many as RAM has pages for: the positions ``in_ram``.

    Never so few that a prompt could wait forever behind decoding sequences. Raises ServeError where RAM has fewer pages
    than these need.
    """
    planned = planned_tokens(plan)
    wanted = min(options.max_batch_tokens, planned or options.max_batch_tokens)
    sequences = sequences_at_once(plan, options)
    least = sequences + PROMPT_BLOCK
    if in_ram is not None:
        most = in_ram - PROMPT_BLOCK * least_pages(sequences, 0)
        if most < least:
            raise ServeError(
                f"RAM has memory for keys and values of {in_ram} tokens, and steps of {sequences} sequences write to "
                f"pages of {in_ram - most + least}; let fewer sequences run, or give the host a larger budget"
            )
        wanted = min(wanted, most)
    return max(wanted, least)


def kv_budget(
    holders: Seq[KVOwner],
    plan: Any,
    options: EngineOptions,
    gathered: Mapping[str, int] | None = None,
    unplanned: Mapping[str, int] | None = None,
) -> KVBudget:
    """Bytes for keys and values by device: the options' number, else the plan's, else a share of what is free.

    Where attention gathers keys and values from pages, each position beyond those of the plan leaves memory free for
    them, too: as much as the plan says. A plan that counts no keys and values says nothing; ``gathered`` has the bytes
    of one position of one layer then. ``unplanned`` are bytes of recurrent states beyond the plan's, where it leaves as
    many free.

    Raises ServeError when the options ask for more than the plan leaves on a device.
    """
    per_token: dict[str, int] = {}
    for holder in holders:
        for device, size in holder.bytes_per_token().items():
            per_token[device] = per_token.get(device, 0) + size
    entries = plan_devices(plan)
    share = _share(plan, options)
    found = {}
    for device, nbytes in per_token.items():
        entry = entries.get(device)
        of, gather = nbytes, (gathered or {}).get(device, 0)
        if entry is not None and entry.kv_cache:
            of, gather = entry.kv_cache, entry.kv_gather if gathered else 0
        part = of / (of + gather) if of else 1.0
        found[device] = _kv_bytes(device, entry, share, options, part, (unplanned or {}).get(device, 0))
    return KVBudget(per_token, found, _on_disk(plan, entries, share, found))


def _on_disk(plan: Any, entries: Mapping[str, Any], share: float, found: Mapping[str, int]) -> int:
    """Bytes on disk for keys and values of the host: what RAM does not hold of those of all sequences, as far as the
    disk's budget goes."""
    if plan is None or not plan.kv_on_disk:
        return 0
    entry = entries[DISK]
    wanted = max(int((entries[HOST].kv_cache + entry.kv_cache) * share) - found.get(HOST, 0), 0)
    return wanted if entry.free is None else min(wanted, entry.kv_cache + max(0, int(entry.free)))


def positions_of_attention(plan: Any) -> int:
    """Most positions of a text whose prompt attends block by block, each with memory for its rows and positions: then
    these take what the plan counted for the rows of a forward that attend to its context."""
    if plan is None or not plan.context_length:
        return ANY_NUMBER
    return int(plan.context_length * max(planned_tokens(plan), PROMPT_BLOCK) // PROMPT_BLOCK)


def planned_tokens(plan: Any) -> int:
    """Tokens of a forward that the plan's activations were counted for; 0 without a plan."""
    if plan is None:
        return 0
    chunk = plan.prefill_chunk_size
    return int(plan.batch_size * (plan.context_length if chunk is None else min(chunk, plan.context_length)))


def positions_of_slots(plan: Any) -> int:
    """Most positions that are fetched from the host at once, where a plan has slots for keys and values: as many as its
    sequences have, and those that it leaves memory for."""
    if plan is None or not plan.kv_on_host:
        return ANY_NUMBER
    return max(int(plan.context_length * (plan.max_sequences() or plan.batch_size)), GROWTH)


def claimed_bytes(plan: Any, options: EngineOptions) -> dict[int | str, int]:
    """Most bytes that a model and its engine take of each device, by the plan's device keys.

    They are the plan's, and where the options ask for more keys and values than it has, these and what attention
    gathers of them. A plan that is made anew once activations are measured may take all of its budgets.

    Raises ServeError when the options ask for more than the plan leaves on a device.
    """
    share = _share(plan, options)
    claimed: dict[int | str, int] = {}
    for key, entry in plan.devices.items():
        claimed[key] = entry.total
        if plan.guarded and entry.budget is not None:
            claimed[key] = entry.budget
        elif entry.kv_cache:
            part = entry.kv_cache / (entry.kv_cache + entry.kv_gather)
            beyond = _kv_bytes(normalize_device(key), entry, share, options, part) - entry.kv_cache
            claimed[key] += ceil(max(0, beyond) / part)
    return claimed


def plan_devices(plan: Any) -> dict[str, Any]:
    """The plan's entries by canonical device name; empty without a plan."""
    devices = getattr(plan, "devices", None)
    if not devices:
        return {}
    entries = devices.items() if isinstance(devices, Mapping) else [(entry.device, entry) for entry in devices]
    return {normalize_device(device): entry for device, entry in entries}


def _share(plan: Any, options: EngineOptions) -> float:
    """Factor of the planned keys and values: sequences at once, in units of the planned batch."""
    if plan is None or not plan.batch_size:
        return 1.0
    room = plan.max_sequences() or plan.batch_size
    return max(plan.batch_size, min(room, sequences_at_once(plan, options))) / plan.batch_size


def _kv_bytes(device: str, entry: Any, share: float, options: EngineOptions, part: float, unplanned: int = 0) -> int:
    """Bytes for keys and values on ``device``.

    Args:
        device: Its name.
        entry: The plan's entry of it, if any.
        share: As `_share` returns it.
        options: Of the engine.
        part: Part of the plan's free bytes that they may take.
        unplanned: Bytes beyond those of the plan that they take where these are free.
    """
    planned = 0 if entry is None else int(entry.kv_cache)
    most = None if entry is None or entry.free is None else max(0, planned + int(entry.free * part))
    if options.kv_bytes is None:
        wanted = int(planned * share)
        if not wanted:
            return int(free_memory_bytes(device) * KV_SHARE)
        return wanted + unplanned if most is None else min(wanted + unplanned, max(most, planned))
    if most is not None and options.kv_bytes > most:
        raise ServeError(
            f"{format_size(options.kv_bytes)} for keys and values are more than the plan leaves on {device}: "
            f"{format_size(most)} of its {format_size(entry.budget)}; ask for less, for fewer "
            "or shorter sequences, or give the device a larger budget"
        )
    return options.kv_bytes
