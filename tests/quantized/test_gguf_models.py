"""Models in GGUF files compute what the models of transformers that they stand for do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel.dispatch import from_pretrained

from .checkpoints import TOKENS
from .gguf_files import FAMILIES, GPT_OSS, Family, gguf_file


@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.make.__name__)
def test_a_model_computes_bit_for_bit_what_its_dequantised_self_does(family: Family, kind: str, tmp_path: Path) -> None:
    kind = "MXFP4" if family is GPT_OSS and kind == "Q4_0" else kind
    whole = gguf_file(tmp_path / "m.gguf", family, kind)
    model = from_pretrained(tmp_path / "m.gguf", device_map="cpu", context_length=16)
    assert model.dtype == whole.dtype
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)
