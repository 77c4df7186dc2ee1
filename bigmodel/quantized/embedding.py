"""An embedding that holds its table as a checkpoint stores it, and restores the rows that are looked up.

Its output is bitwise that of transformers' or torch's own class with the restored table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from ..sources.headers import TensorEntry
from .formats.format import WeightFormat
from .stored import StoredModule


class QuantizedEmbedding(StoredModule):
    """The part of a class of quantised embeddings that `become_embedding` adds to the module's own class.

    Attributes:
        format: how the table is stored.
    """

    format: WeightFormat
    num_embeddings: int
    embedding_dim: int

    def restored(self) -> torch.Tensor:
        """Return the whole table in `compute_dtype`, on the device of the stored tensors."""
        return self.format.restore(self._tensors(), (self.num_embeddings, self.embedding_dim), self.compute_dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        numbers = input.reshape(-1)
        looked_up = {leaf: tensor[numbers] for leaf, tensor in self._tensors().items()}
        rows = self.format.restore(looked_up, (numbers.numel(), self.embedding_dim), self.compute_dtype)
        plain: Any = type(self).__bases__[1]
        other = object.__new__(plain)
        other.__dict__.update(self.__dict__)
        other.__dict__["_parameters"] = {"weight": rows}
        other.__dict__["padding_idx"] = None
        other.__dict__.pop("forward", None)
        places = torch.arange(numbers.numel(), device=input.device).view(input.shape)
        output: torch.Tensor = plain.forward(other, places)
        return output

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {leaf: getattr(self, name) for name, leaf in self.stored.items()}

    def __getattr__(self, name: str) -> Any:
        # Code that reads the table gets it restored.
        if name == "weight" and "stored" in self.__dict__:
            return self.restored()
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format.label!r}"


def become_embedding(
    module: nn.Embedding, dtype: torch.dtype, format: WeightFormat, tensors: Mapping[str, TensorEntry]
) -> dict[str, str]:
    """Make an embedding on meta, whose table has been removed, one with a stored table, in place.

    Args:
        module: the embedding; others may refer to it.
        dtype: dtype of its table.
        format: how the table is stored, with each row on its own.
        tensors: its tensors in the header by leaf.

    Returns:
        The leaf of each stored tensor by the name of its parameter.
    """
    changed: Any = module
    plain: Any = type(module)
    changed.__class__ = _quantized_class(plain)
    changed.stored, changed.compute_dtype, changed.format = {}, dtype, format
    for leaf, entry in tensors.items():
        changed.add_stored(leaf, entry.shape, entry.dtype)
    found: dict[str, str] = changed.stored
    return found


@cache
def _quantized_class(plain: type[nn.Module]) -> type[QuantizedEmbedding]:
    return type(f"Quantized{plain.__name__}", (QuantizedEmbedding, plain), {"__module__": plain.__module__})
