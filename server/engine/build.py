"""An engine from a model: runner, memory budget, scheduler, thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from bigmodel.devices import format_size, free_memory_bytes, normalize_device
from bigmodel.errors import ServeError
from server.engine.attention import PROMPT_BLOCK
from server.engine.core import EngineCore
from server.engine.draft import Drafter, ModelDrafter
from server.engine.engine import Engine
from server.engine.host_linear import HostLinear
from server.engine.observer import Observer, Silent
from server.engine.plain import PlainRunner
from server.engine.pool import KVBudget, TokenPool
from server.engine.prefix import PrefixCache
from server.engine.runner import Runner
from server.engine.runner_choice import choose_runner
from server.engine.scheduler import Scheduler
from server.text.codec import TextCodec

DEFAULT_SHARE = 0.25  # of a device's free memory, for keys and values, when no plan says how much
DEFAULT_SEQUENCES = 16  # at once, when no plan says how many


@dataclass(frozen=True)
class EngineOptions:
    """How the engine batches and what it may hold.

    ``max_sequences``: generated at once (None: as many as the plan was made for, else
    :data:`DEFAULT_SEQUENCES`). ``max_batch_tokens``: computed in one step; raised where that is too few for so
    many sequences. ``kv_bytes``: bytes for keys and values on every device (None: from the plan, else a quarter
    of what is free). ``max_length``: prompt plus output of one sequence, in tokens (None: the model's context).
    ``max_queue``: sequences that may wait beyond those that run. ``row_multiple``: see
    :mod:`server.engine.invariance`; 1 gives up equal bits alone and in a batch for the speed of one stream.
    ``host_linear``: what multiplies by float32 weights on the host, see :mod:`server.engine.host_linear`.
    ``draft_tokens``: guesses a step, where there is a draft model.
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


def build_engine(
    model: torch.nn.Module,
    tokenizer: Any,
    plan: Any = None,
    options: EngineOptions = EngineOptions(),
    *,
    draft_model: torch.nn.Module | None = None,
    observer: Observer | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> Engine:
    """An engine for ``model``, not started yet; ``draft_model`` guesses tokens that it checks."""
    model.eval()
    runner = choose_runner(model, row_multiple=options.row_multiple, host_linear=options.host_linear)
    drafter = make_drafter(model, draft_model, options, runner)
    budget = kv_budget([runner] if drafter is None else [runner, drafter], plan, options)
    pool = TokenPool(budget.tokens)
    prefix = PrefixCache(pool, enabled=options.prefix_cache and not isinstance(runner, PlainRunner))
    sequences = options.max_sequences or getattr(plan, "batch_size", None) or DEFAULT_SEQUENCES
    batch_tokens = max(options.max_batch_tokens, sequences + PROMPT_BLOCK)
    scheduler = Scheduler(pool, prefix, max_sequences=sequences, max_batch_tokens=batch_tokens)
    codec = tokenizer if isinstance(tokenizer, TextCodec) else TextCodec(tokenizer)
    # A tokenizer may know more tokens than the model was trained for; those cannot be computed.
    codec.vocabulary_size = min(codec.vocabulary_size, vocabulary_size(model))
    core = EngineCore(
        runner,
        scheduler,
        codec,
        observer or Silent(),
        eos_ids=end_tokens(model, tokenizer),
        max_length=min(options.max_length or context_length(model), pool.capacity),
        vocabulary_size=vocabulary_size(model),
        drafter=drafter,
    )
    return Engine(
        core,
        max_requests=sequences + options.max_queue,
        kv_bytes_per_token=budget.bytes_per_token,
        on_failure=on_failure,
    )


def make_drafter(
    model: torch.nn.Module, draft_model: torch.nn.Module | None, options: EngineOptions, runner: Runner
) -> ModelDrafter | None:
    """What guesses tokens with ``draft_model``; None without one."""
    if draft_model is None:
        return None
    if isinstance(runner, PlainRunner):
        raise ServeError("a draft model needs a model that runs packed; this one is computed one by one")
    if vocabulary_size(draft_model) != vocabulary_size(model):
        raise ServeError(
            f"the draft model has {vocabulary_size(draft_model)} tokens, the model {vocabulary_size(model)}; "
            "they must have the same vocabulary"
        )
    return ModelDrafter(draft_model.eval(), options.draft_tokens, host_linear=options.host_linear)


def kv_budget(holders: Seq[Runner | Drafter], plan: Any, options: EngineOptions) -> KVBudget:
    """Bytes for keys and values per device: what the options say, else the plan, else a share of what is free.

    Raises ServeError when the options ask for more than the plan leaves on a device: its budget would not hold.
    """
    per_token: dict[str, int] = {}
    for holder in holders:
        for device, size in holder.bytes_per_token().items():
            per_token[device] = per_token.get(device, 0) + size
    planned = plan_devices(plan)
    return KVBudget(per_token, {device: _kv_bytes(device, planned.get(device), options) for device in per_token})


def _kv_bytes(device: str, entry: Any, options: EngineOptions) -> int:
    """Bytes for keys and values on ``device``, of which the plan says ``entry`` (None: nothing)."""
    planned = 0 if entry is None else int(entry.kv_cache)
    if options.kv_bytes is None:
        return planned or int(free_memory_bytes(device) * DEFAULT_SHARE)
    if entry is not None and entry.free is not None and options.kv_bytes > planned + entry.free:
        raise ServeError(
            f"{format_size(options.kv_bytes)} for keys and values are more than the plan leaves on {device}: "
            f"{format_size(max(0, planned + entry.free))} of its {format_size(entry.budget)}; ask for less, for fewer "
            "or shorter sequences, or give the device a larger budget"
        )
    return options.kv_bytes


def plan_devices(plan: Any) -> dict[str, Any]:
    """The plan's entry of each device, by canonical device name; empty without a plan."""
    devices = getattr(plan, "devices", None)
    if not devices:
        return {}
    entries = devices.items() if isinstance(devices, Mapping) else [(entry.device, entry) for entry in devices]
    return {normalize_device(device): entry for device, entry in entries}


def end_tokens(model: torch.nn.Module, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: those of the generation config, and the tokenizer's."""
    found: set[int] = set()
    config = getattr(model, "generation_config", None)
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    for value in (getattr(config, "eos_token_id", None), getattr(inner, "eos_token_id", None)):
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(int(token) for token in found)


def context_length(model: torch.nn.Module) -> int:
    """Positions the model was made for."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return int(getattr(config, "max_position_embeddings", None) or 1 << 20)


def vocabulary_size(model: torch.nn.Module) -> int:
    """The width of the model's logits."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return int(config.vocab_size)
