"""From what a person types to a dispatched model with its tokenizer and plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bigmodel.checkpoint.progress import watching
from bigmodel.errors import ServeError, SizeError
from server.app import Loaded
from server.engine.options import DEFAULT_SEQUENCES, EngineOptions
from server.state import Loading


def parse_max_memory(text: str | None) -> dict[int | str | torch.device, int | str] | None:
    """``"0=10GiB,cpu=8GiB"`` as a mapping; None stays None. Raises SizeError for anything else."""
    if text is None:
        return None
    budgets: dict[int | str | torch.device, int | str] = {}
    for part in text.split(","):
        device, equals, size = (piece.strip() for piece in part.partition("="))
        if not (device and equals and size):
            raise SizeError(f"--max-memory: '{part}' is not DEVICE=SIZE, as in 0=10GiB,cpu=8GiB")
        budgets[int(device) if device.isdecimal() else device] = size
    return budgets


def load_options(
    device_map: str,
    max_memory: str | None,
    dtype: str,
    revision: str | None,
    trust_remote_code: bool,
    engine: EngineOptions,
    offload: str = "stream",
    offload_dtype: str | None = None,
    offload_folder: str | None = None,
) -> dict[str, Any]:
    """Keyword arguments of :func:`load` from what was typed; memory is planned for what ``engine`` will serve."""
    return {
        "device_map": device_map,
        "max_memory": parse_max_memory(max_memory),
        "dtype": dtype,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "offload": offload,
        "offload_dtype": offload_dtype,
        "offload_folder": offload_folder,
        "batch_size": engine.max_sequences or DEFAULT_SEQUENCES,
        "context_length": engine.max_length,
    }


def load(
    model: str,
    *,
    device_map: str = "auto",
    max_memory: Mapping[int | str | torch.device, int | str] | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    offload: str = "stream",
    offload_dtype: str | None = None,
    offload_folder: str | None = None,
    batch_size: int = 1,
    context_length: int | None = None,
    progress: Loading | None = None,
) -> Loaded:
    """Load ``model`` (a folder or a Hub id), placed by plan, with its tokenizer.

    ``device_map`` is a strategy ("auto", "balanced", "sequential", ...) or one device. Memory for keys and
    values is planned for ``batch_size`` sequences of ``context_length`` tokens (None: the planner's default).
    ``offload``, ``offload_dtype`` and ``offload_folder`` are those of ``from_pretrained``.
    """
    from transformers import AutoTokenizer

    from bigmodel.dispatch import from_pretrained, get_plan
    from bigmodel.profile.resolve import open_source

    progress = progress or Loading()
    progress.begin("looking for the model")
    open_source(model, revision, trust_remote_code=trust_remote_code)  # says what is wrong before anything is loaded
    progress.begin("loading the tokenizer")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ServeError(f"no tokenizer can be loaded from '{model}': {error}") from error
    progress.measure()
    progress.begin("loading the weights")
    with watching(progress.report):
        placed = from_pretrained(
            model,
            device_map=device_map,
            max_memory=max_memory,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            offload=offload,
            offload_dtype=offload_dtype,
            offload_folder=offload_folder,
            batch_size=batch_size,
            context_length=context_length,
            per_pass=False,  # the engine keeps keys and values itself
        )
    return Loaded(placed, tokenizer, get_plan(placed))


def with_draft(loaded: Loaded, draft: Loaded) -> Loaded:
    """``loaded`` with the model of ``draft`` guessing for it. Raises ServeError unless they speak the same tokens."""
    if loaded.tokenizer.get_vocab() != draft.tokenizer.get_vocab():
        raise ServeError("the draft model's tokenizer is not the model's: a guess would mean another text")
    return replace(loaded, draft_model=draft.model)


def display_name(model: str) -> str:
    """What clients call a model: the Hub id, or the last part of a path."""
    path = Path(model)
    return path.resolve().name if path.exists() else model
