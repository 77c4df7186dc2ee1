"""From what a person types to a dispatched model with its tokenizer and plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from bigmodel.checkpoint.progress import watching
from bigmodel.errors import ServeError, SizeError
from bigmodel.server.app import Loaded
from bigmodel.server.state import Loading

if TYPE_CHECKING:
    from typing_extensions import Unpack


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


class LoadOptions(TypedDict, total=False):
    """The arguments of ``bigmodel.from_pretrained`` that the command line knows; what is left out has its default."""

    device_map: str
    max_memory: Mapping[int | str | torch.device, int | str] | None
    dtype: str
    revision: str | None
    trust_remote_code: bool
    offload: str
    offload_dtype: str | None
    offload_folder: str | None
    batch_size: int
    context_length: int | None


def load(model: str, *, progress: Loading | None = None, **options: Unpack[LoadOptions]) -> Loaded:
    """Load ``model`` (a folder or a Hub id), placed by plan, with its tokenizer.

    Memory for keys and values is planned for ``batch_size`` sequences of ``context_length`` tokens.
    """
    from transformers import AutoTokenizer

    from bigmodel.dispatch import from_pretrained, get_plan
    from bigmodel.sources.resolve import open_source

    revision, trusted = options.get("revision"), options.get("trust_remote_code", False)
    progress = progress or Loading()
    progress.begin("looking for the model")
    open_source(model, revision, trust_remote_code=trusted)  # says what is wrong before anything is loaded
    progress.begin("loading the tokenizer")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        raise ServeError(f"no tokenizer can be loaded from '{model}': {error}") from error
    progress.measure()
    progress.begin("loading the weights")
    with watching(progress.report):
        placed = from_pretrained(model, per_pass=False, **options)  # the engine keeps keys and values itself
    return Loaded(placed, tokenizer, get_plan(placed))


def load_with_draft(
    model: str, draft_model: str | None, *, progress: Loading | None = None, **options: Unpack[LoadOptions]
) -> Loaded:
    """As :func:`load`, with the draft model where there is one; that is loaded to where it fits, as it is stored."""
    loaded = load(model, progress=progress, **options)
    return loaded if draft_model is None else with_draft(loaded, load(draft_model, progress=progress))


def with_draft(loaded: Loaded, draft: Loaded) -> Loaded:
    """``loaded`` with the model of ``draft`` guessing for it. Raises ServeError unless they speak the same tokens."""
    if loaded.tokenizer.get_vocab() != draft.tokenizer.get_vocab():
        raise ServeError("the draft model's tokenizer is not the model's: a guess would mean another text")
    return replace(loaded, draft_model=draft.model)


def display_name(model: str) -> str:
    """What clients call a model: the Hub id, or the last part of a path."""
    path = Path(model)
    return path.resolve().name if path.exists() else model
