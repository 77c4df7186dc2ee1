"""Plan and load the MTP head of a checkpoint: a part that proposes tokens, held or streamed as blocks are."""

from __future__ import annotations

from collections.abc import KeysView, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint import Checkpoint
from ..checkpoint.checkpoint import Shard
from ..devices import DeviceLike
from ..devices.default_dtype import changing_default_dtype
from ..devices.empty import init_empty_weights
from ..errors import BudgetError
from ..plan import Plan, plan
from ..plan.result.budgets import Key, is_accelerator
from ..profile.model.mtp import as_head
from ..profile.source import meta_model, model_config, model_dtype
from ..quantized.recognise import quantization_config
from ..quantized.replace import use_stored_weights
from ..sources.headers import TensorEntry
from ..sources.mtp import MtpSource
from .dispatch import place_and_attach
from .placement.fused_checkpoint import load_in_place
from .placement.options import Options
from .placement.resolve import resolve_device_map

SHARES = (0.25, 0.5, 1.0)
"""Shares of an accelerator's budget that a head may take: the first in which it runs there. It computes once for each
token that it proposes, as each layer of the model does once in a pass, so most of the memory is for those."""


def plan_head(source: MtpSource, budgets: Mapping[Key, int], dtype: str = "auto", **shapes: Any) -> Plan:
    """Return the plan of a checkpoint's MTP head; no weight is read.

    Args:
        source: the head in its checkpoint.
        budgets: bytes by device key, of the whole model; the head takes a share of them.
        dtype: ``"auto"`` for the config's dtype.
        **shapes: arguments of `plan`: `batch_size`, `context_length`, ...

    Raises:
        BudgetError: it does not fit.
        CheckpointError: the checkpoint is damaged.
    """
    head = as_head(meta_model(source, dtype))
    refused: BudgetError | None = None
    accelerated = any(is_accelerator(key) and size for key, size in budgets.items())
    for share in SHARES:
        within: dict[DeviceLike, int | str] = {}
        within |= {key: int(size * share) if is_accelerator(key) else size for key, size in budgets.items()}
        try:
            made = plan(head, within, draft_tokens=1, per_pass=False, padded=False, **shapes)
        except BudgetError as error:
            refused = error
            continue
        if not accelerated or share == SHARES[-1] or any(map(is_accelerator, made.execution.values())):
            # The allocator's limit is the device's, whatever else is there.
            whole = {key: replace(device, budget=budgets.get(key)) for key, device in made.devices.items()}
            return replace(made, devices=whole)
    assert refused is not None
    raise refused


def load_head(source: MtpSource, made: Plan, dtype: str = "auto") -> PreTrainedModel:
    """Load a checkpoint's MTP head as planned, and dispatch it.

    Args:
        source: the head in its checkpoint.
        made: its plan.
        dtype: ``"auto"`` for the config's dtype.

    Raises:
        CheckpointError: the checkpoint is damaged, or a tensor of the head is missing.
    """
    checkpoint = renamed(Checkpoint.open(source.fetch_weights()), source.names)
    config = model_config(source)
    wanted = model_dtype(dtype, config, lambda: map(checkpoint.entry, checkpoint))
    head = as_head(_skeleton(source, config, wanted))
    if quantization_config(source.config_dict()) is not None:
        entries = {name: checkpoint.entry(name) for name in checkpoint}
        read = checkpoint.__getitem__
        use_stored_weights(head, source.config_dict(), entries, source.name, read=lambda entry: read(entry.name))
    resolved = resolve_device_map(head, made)
    load_in_place(
        head,
        checkpoint,
        device_map=resolved.keys,
        dtype=None,
        read_later=resolved.reads_ahead,
        upload_bytes=made.upload_bytes,
    )
    place_and_attach(head, resolved, Options(align_memory=False), None)
    return head.eval()


def _skeleton(source: MtpSource, config: Any, dtype: torch.dtype) -> Any:
    import transformers

    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    builder = next((each for each in named if each is not None), None) or transformers.AutoModelForCausalLM
    build = getattr(builder, "_from_config", None) or builder.from_config
    with changing_default_dtype(), init_empty_weights():
        return build(config, dtype=dtype)


class _RenamedShard:
    """Tensors of a file of a checkpoint under other names."""

    def __init__(self, shard: Shard, names: Mapping[str, str]) -> None:
        self.path = shard.path
        self._shard, held = shard, shard.keys()
        self._published = {new: name for name, new in names.items() if name in held}

    def keys(self) -> KeysView[str]:
        return self._published.keys()

    def entry(self, name: str) -> TensorEntry:
        return replace(self._shard.entry(self._published[name]), name=name)

    def tensor(self, name: str, resident: bool = False) -> torch.Tensor:
        return self._shard.tensor(self._published[name], resident)


def renamed(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return those tensors of a checkpoint that `names` has, under the names that it gives them."""
    shards: dict[str, Shard] = {file: _RenamedShard(shard, names) for file, shard in checkpoint.shards.items()}
    return Checkpoint(checkpoint.path, shards, {names[name]: checkpoint.file(name) for name in names})
