"""ggml's types: how the elements of a tensor are stored, in blocks along its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One type.

    Attributes:
        name: its name, such as ``"Q4_K"``.
        elements: elements of a block.
        nbytes: bytes of a block.
        dtype: the torch dtype of single elements; None: blocks have a structure of their own.
    """

    name: str
    elements: int
    nbytes: int
    dtype: torch.dtype | None = None

    @property
    def leaf(self) -> str:
        """Last part of the name of a weight's stored tensor, such as ``"weight_q4_k"``."""
        return f"weight_{self.name.lower()}"


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, torch.float32),
    1: GgmlType("F16", 1, 2, torch.float16),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    30: GgmlType("BF16", 1, 2, torch.bfloat16),
    39: GgmlType("MXFP4", 32, 17),
}
"""Supported types by their number in files."""

OTHER_NAMES = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
"""Names of types that are not supported, for messages."""
