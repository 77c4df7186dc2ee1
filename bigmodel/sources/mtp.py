"""Heads that predict a further token (MTP, multi-token prediction), as checkpoints bring them.

DeepSeek V3 and GLM have one behind their last layer N, under ``model.layers.N.``; Qwen3-Next under ``mtp.``. Each is
one decoder layer of the model's own kind, between a projection of a token's embedding and the state before it, and a
norm. The models of transformers leave these tensors out. Here they are the tensors of a model of the same architecture
with one layer, whose embedding is that projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointMismatchError
from .headers import TensorEntry
from .local import ModelSource

INPUT = "model.embed_tokens."
"""Prefix of the projection's tensors in the head: ``enorm``, ``hnorm`` and ``eh_proj``."""

_SHARED = ("embed_tokens.", "shared_head.head.")
"""Copies of the model's own embedding and output layer, which are used in their place."""

_OF_LAYER = {"shared_head.norm.": "model.norm.", **{f"{name}.": f"{INPUT}{name}." for name in ("enorm", "hnorm")}}
_OF_LAYER["eh_proj."] = f"{INPUT}eh_proj."

_OF_MTP = {
    "fc.": f"{INPUT}eh_proj.",
    "pre_fc_norm_embedding.": f"{INPUT}enorm.",
    "pre_fc_norm_hidden.": f"{INPUT}hnorm.",
    "norm.": "model.norm.",
    "layers.0.": "model.layers.0.",
}


def head_name(name: str, layers: int) -> str | None:
    """Return the name that a tensor of a checkpoint has in the head; None if it is none of the head's own.

    Args:
        name: the tensor in the checkpoint.
        layers: the model's number of layers.
    """
    if name.startswith("mtp."):
        rest = name.removeprefix("mtp.")
        return next((new + rest.removeprefix(old) for old, new in _OF_MTP.items() if rest.startswith(old)), None)
    if not name.startswith(f"model.layers.{layers}."):
        return None
    rest = name.removeprefix(f"model.layers.{layers}.")
    if rest.startswith(_SHARED):
        return None
    found = next((new + rest.removeprefix(old) for old, new in _OF_LAYER.items() if rest.startswith(old)), None)
    return found or f"model.layers.0.{rest}"


class MtpSource(ModelSource):
    """The first MTP head in a model's checkpoint, as the source of a model of one layer.

    Args:
        whole: the model's source.

    Attributes:
        names: names in the head by name in the checkpoint.

    Raises:
        CheckpointMismatchError: the checkpoint has no head.
    """

    def __init__(self, whole: ModelSource) -> None:
        self.whole = whole
        self.name = whole.name
        content = whole.config_dict()
        layers = content.get("num_hidden_layers")
        found = {} if layers is None else {name: head_name(name, layers) for name in whole.weight_map()}
        self.names = {name: new for name, new in found.items() if new is not None}
        if f"{INPUT}eh_proj.weight" not in self.names.values():
            raise CheckpointMismatchError(
                f"{whole.name}: this checkpoint has no MTP head to propose tokens with: neither "
                f"model.layers.{layers}.eh_proj behind its layers, nor mtp.fc; use a draft model or prompt lookup"
            )
        self._config = head_config(content, any(".mlp.experts." in name for name in self.names))

    def config_dict(self) -> dict[str, Any]:
        return self._config

    def weight_files(self) -> list[str]:
        return self.whole.weight_files()

    def headers(self) -> dict[str, dict[str, TensorEntry]]:
        return {
            file: {
                self.names[name]: replace(entry, name=self.names[name])
                for name, entry in header.items()
                if name in self.names
            }
            for file, header in self.whole.headers().items()
        }

    def fetch_weights(self) -> Path:
        return self.whole.fetch_weights()

    def weight_map(self) -> dict[str, str]:
        return {self.names[name]: file for name, file in self.whole.weight_map().items() if name in self.names}


def head_config(content: Mapping[str, Any], sparse: bool) -> dict[str, Any]:
    """Return the config of a model of one layer, of the kind that the head has.

    Args:
        content: the model's ``config.json``.
        sparse: the head has experts.
    """
    kinds = content.get("layer_types") or ()
    one_layer = {
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "layer_types": ["full_attention" if "full_attention" in kinds else (*kinds, "full_attention")[-1]],
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "num_nextn_predict_layers": 0,
    }
    known = {name: value for name, value in one_layer.items() if content.get(name) is not None}
    return {**content, **known, "num_hidden_layers": 1, "tie_word_embeddings": False}
