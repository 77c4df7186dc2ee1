"""GPTQ: integers with a scale and a zero point for each group of inputs, which need not be consecutive.

``quant_method`` is ``"gptq"``. The weight is stored transposed: ``qweight`` (in / 8, out) has eight 4-bit integers of
consecutive inputs in an int32, ``qzeros`` (groups, out / 8) the zero points of consecutive outputs, less one in the
first version of the format, and ``scales`` is (groups, out). ``g_idx`` (in) is the group of each input; with act-order
(``desc_act``) inputs of a group are not consecutive. A weight is scale * (integer - zero point) in the scale's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...sources.headers import TensorEntry
from .format import Read, Scheme, Stored, Tensors, WeightFormat, ceil_div, refuse_config, whole_number
from .nibbles import cast, unpack_words


@dataclass(frozen=True)
class Gptq(WeightFormat):
    """Integers of `bits` in groups of `group` inputs (None: one group), with `added` to stored zero points."""

    bits: int
    group: int | None
    added: int

    checked = ("scales", "g_idx")

    @property
    def label(self) -> str:
        return f"gptq int{self.bits}, {'one group' if self.group is None else f'groups of {self.group}'}"

    def stored(self, shape: tuple[int, int]) -> dict[str, Stored]:
        rows, columns = shape
        per_word = 32 // self.bits
        if columns % per_word or rows % per_word:
            raise ValueError(f"a weight of {rows} x {columns} does not fill words of {per_word} integers")
        groups = ceil_div(columns, self.group or columns)
        return {
            "qweight": Stored((columns // per_word, rows), (torch.int32,)),
            "qzeros": Stored((groups, rows // per_word), (torch.int32,)),
            "scales": Stored((groups, rows), (torch.float16, torch.bfloat16, torch.float32)),
            "g_idx": Stored((columns,), (torch.int32,), optional=True),
        }

    def broken(self, leaf: str, tensor: torch.Tensor) -> str | None:
        if leaf != "g_idx":
            return super().broken(leaf, tensor)
        groups = ceil_div(tensor.numel(), self.group or tensor.numel())
        inside = tensor.numel() == 0 or (int(tensor.min()) >= 0 and int(tensor.max()) < groups)
        return None if inside else f"its g_idx names groups outside 0 ... {groups - 1}"

    def step(self, shape: tuple[int, int]) -> int:
        return 32 // self.bits

    def rows(self, tensors: Tensors, shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        per_word = 32 // self.bits
        scales = tensors["scales"][:, start:stop]
        integers = unpack_words(tensors["qweight"][:, start:stop], self.bits, dim=0).to(scales.dtype)
        words = tensors["qzeros"][:, start // per_word : ceil_div(stop, per_word)]
        zeros = unpack_words(words, self.bits, dim=1).to(scales.dtype) + self.added
        group = self.group or shape[1]
        if "g_idx" in tensors or shape[1] % group:  # inputs of a group need not be consecutive
            consecutive = torch.arange(shape[1], device=scales.device) // group
            groups = tensors.get("g_idx", consecutive).long()
            values = integers.sub_(zeros.index_select(0, groups)).mul_(scales.index_select(0, groups))
        else:
            grouped = integers.unflatten(0, (scales.shape[0], -1))
            values = grouped.sub_(zeros.unsqueeze(1)).mul_(scales.unsqueeze(1)).flatten(0, 1)
        return cast(values, dtype).transpose(0, 1)


@dataclass(frozen=True)
class GptqScheme(Scheme):
    """``quant_method: gptq``."""

    format: Gptq
    method = "gptq"
    leaves = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    marks = frozenset({"qweight"})

    def format_of(self, name: str, found: Mapping[str, TensorEntry], read: Read | None = None) -> WeightFormat:
        return self.format


def read(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a ``quantization_config``.

    Raises:
        CheckpointFormatError: a value of it is not supported.
    """
    bits = whole_number(config, "bits", 4)
    if bits not in (2, 4, 8):
        raise refuse_config(f"gptq with {bits} bits is not supported; 2, 4 and 8 are")
    version = config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise refuse_config(f"checkpoint_format is {version!r:.60}; gptq and gptq_v2 are supported")
    if config.get("dynamic"):
        raise refuse_config("gptq with different settings by module ('dynamic') is not supported")
    group = None if config.get("group_size", 128) == -1 else whole_number(config, "group_size", 128)
    return GptqScheme(Gptq(bits, group, added=1 if version == "gptq" else 0))
