"""Padded batches: shorter sequences of a batch are filled up, and a mask says where.

Without padding, models of transformers leave the mask out, and kernels that need none take less memory. A plan has to
hold for both, so forwards of a batch of several sequences are recorded with padding, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from .workload import Workload

MASK = "attention_mask"
"""Argument of a forward that says which tokens of a text, or samples of a sound, are not padding."""


def may_be_padded(workload: Workload) -> bool:
    """Return whether a batch has several sequences, whose lengths may differ."""
    return workload.batch_size > 1


def padding_mask(batch_size: int, length: int, prompt: int | None = None) -> torch.Tensor:
    """Return the mask of a batch whose last sequence begins with one token of padding: int64, (batch, length).

    One sequence has no padding.

    Args:
        batch_size: sequences.
        length: tokens of each.
        prompt: tokens of the prompt within; None: all. Generated tokens are no padding.
    """
    mask = torch.ones(batch_size, length, dtype=torch.long)
    if batch_size > 1 and (length if prompt is None else prompt) > 1:
        mask[-1, 0] = 0
    return mask


def padding_of(inputs: Mapping[str, Any], accepted: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the masks of a padded batch that a forward takes, by name; none if it takes no mask.

    Args:
        inputs: of the batch without padding, by name. Masks among them are all ones.
        accepted: names of the arguments that the forward takes.
    """
    found = {name: mask for name, value in inputs.items() if (mask := _with_padding(name, value)) is not None}
    sequence = next((name for name in SEQUENCES if name in inputs and inputs[name].dim() == 2), None)
    if MASK in accepted and MASK not in inputs and sequence is not None:
        found[MASK] = padding_mask(*inputs[sequence].shape)
    return found


SEQUENCES = ("input_ids", "input_values")
"""Inputs that `MASK` is about: tokens of texts, samples of sounds."""


def _with_padding(name: str, mask: Any) -> torch.Tensor | None:
    """Return a mask of ones with a zero at the end of its last sequence; None for any other input."""
    known = name.endswith("_mask") and isinstance(mask, torch.Tensor) and mask.device.type != "meta"
    if not known or mask.dim() < 2 or min(mask.shape[0], mask.shape[-1]) < 2 or not bool(mask.all()):
        return None
    changed = mask.clone()
    changed[-1, ..., -1] = 0
    return changed
