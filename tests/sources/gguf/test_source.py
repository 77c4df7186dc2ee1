"""A GGUF file is a source of models: its config, headers and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf import gguf_tokenizer_mapping

from bigmodel.errors import CheckpointFormatError
from bigmodel.sources.gguf.source import gguf_tokenizer
from bigmodel.sources.resolve import open_source
from tests.quantized.gguf_files import LLAMA, gguf_file

LETTERS = [bytes_to_unicode()[octet] for octet in range(256)]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [*LETTERS, "he", "ll", "<|end|>"],
    "tokenizer.ggml.token_type": [1] * 258 + [3],
    "tokenizer.ggml.merges": ["h e", "l l"],
    "tokenizer.ggml.eos_token_id": 258,
}


def test_a_file_has_a_config_and_tensors_with_transformers_names(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", LLAMA, metadata={"tokenizer.ggml.eos_token_id": 2})
    source = open_source(tmp_path)
    config = source.config_dict()
    assert (config["model_type"], config["hidden_size"], config["eos_token_id"]) == ("llama", 64, 2)
    assert config["quantization_config"]["heads"] == {"q_proj": 4, "k_proj": 2}
    assert source.weight_files() == ["m.gguf"]
    assert set(source.headers()["m.gguf"]) == set(source.weight_map())
    assert "model.layers.1.mlp.up_proj.weight_q4_0" in source.weight_map()


@pytest.mark.skipif(
    not hasattr(gguf_tokenizer_mapping, "convert_gguf_tokenizer"),
    reason="this version of transformers reads no tokenizer of llama without the token that begins a text",
)
def test_the_tokenizer_is_the_one_that_the_header_describes(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", LLAMA, metadata=TOKENIZER, vocab_size=259)
    tokenizer = gguf_tokenizer(tmp_path / "m.gguf")
    assert tokenizer("hello<|end|>")["input_ids"] == [256, 257, ord("o"), 258]
    assert tokenizer.decode(tokenizer("hé lló")["input_ids"]) == "hé lló"
    assert tokenizer.eos_token == "<|end|>"


def test_a_file_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", LLAMA)
    with pytest.raises(CheckpointFormatError, match="describes no tokenizer that can be read"):
        gguf_tokenizer(tmp_path / "m.gguf")
