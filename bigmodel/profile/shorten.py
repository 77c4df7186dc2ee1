"""A deep model is a few layers over and over: which few stand for all.

A dry run of every layer of a 126-layer model would take seconds; the layers of one kind do the same thing each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

CONTEXT = 2
"""How many layers before a layer must be of the same kinds for the layer to count as the same."""


@dataclass(frozen=True)
class Shortening:
    """How a list of blocks is cut.

    Attributes:
        path: name of the list in the model.
        units: unit index of each block of the full list.
        kept: how many blocks from the start are run; the last of them stands for the full list's last.
        twins: for each block of the full list, the position of the kept block that stands for it.
    """

    path: str
    units: tuple[int, ...]
    kept: int
    twins: tuple[int, ...]


def shorten(kinds: Sequence[object]) -> tuple[int, tuple[int, ...]] | None:
    """Return how many layers from the start stand for all, and which of these stands for each layer.

    A layer stands for another when both and the `CONTEXT` layers before them are of the same kinds. The last kept
    layer stands for the very last one.

    Args:
        kinds: one value per layer; equal values mean layers that do the same.

    Returns:
        None when nothing can be left out.
    """
    total = len(kinds)
    windows = [tuple(kinds[i - CONTEXT : i + 1]) for i in range(CONTEXT, total)]
    for kept in range(CONTEXT + 2, total):
        if windows[kept - 1 - CONTEXT] != windows[-1]:
            continue
        known = {window: CONTEXT + i for i, window in enumerate(windows[: kept - 1 - CONTEXT])}
        middle = windows[kept - 1 - CONTEXT : -1]
        if all(window in known for window in middle):
            return kept, (*range(kept - 1), *(known[window] for window in middle), kept - 1)
    return None


def kind_of(block: nn.Module) -> object:
    """Return a value that is equal for two blocks that do the same: classes, shapes and plain settings inside."""
    parts: list[object] = []
    for name, module in block.named_modules():
        tensors = [(k, t.shape, t.dtype) for k, t in {**module._parameters, **module._buffers}.items() if t is not None]
        settings = sorted(
            (k, v)
            for k, v in vars(module).items()
            if isinstance(v, (int, float, str, bool)) and k not in ("layer_idx", "layer_id", "layer_index")
        )
        parts.append((name, type(module), tuple(tensors), tuple(map(repr, settings))))
    return tuple(parts)
