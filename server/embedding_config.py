"""How a model's states become an embedding: as sentence-transformers' files in its folder say, or by its kind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigmodel.errors import ServeError
from bigmodel.server.engine.compute.encoder import generates
from bigmodel.server.engine.compute.hidden import output_layer
from bigmodel.server.engine.sampling.pooling import PoolingKind

_MODULES = "modules.json"
_KINDS: dict[str, PoolingKind] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}
_FLAGS: dict[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True)
class EmbeddingConfig:
    """How a vector is made of the states of a text.

    Args:
        pooling: What the states of its tokens become one vector by.
        width: Values of a vector; None where the model does not say.
    """

    pooling: PoolingKind
    width: int | None = None


def embedding_config(model: torch.nn.Module) -> EmbeddingConfig:
    """Return the configuration of a loaded model.

    Raises:
        ServeError: The model has no output layer, or a head for something else, or its folder asks for a module or a
            pooling that is not supported.
    """
    if generates(model) and output_layer(model) is None:
        raise ServeError(
            f"{type(model).__name__} has no output layer of its own in this process, before which its states could be "
            "read"
        )
    if not generates(model) and getattr(model, "base_model", model) is not model:
        raise ServeError(f"{type(model).__name__} has a head for something else; an encoder without one is needed")
    folder = Path(str(getattr(model.config, "name_or_path", "") or ""))
    modules = _read(folder / _MODULES) if (folder / _MODULES).is_file() else None
    if modules is None:
        return EmbeddingConfig("last" if _is_causal(model) else "mean", _width(model))
    pooling: PoolingKind | None = None
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(_read(folder / str(module["path"]) / "config.json"))
        elif kind not in ("Transformer", "Normalize"):
            raise ServeError(f"{folder / _MODULES}: the module '{kind}' of sentence-transformers is not supported")
    if pooling is None:
        raise ServeError(f"{folder / _MODULES}: names no pooling")
    return EmbeddingConfig(pooling, _width(model))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ServeError(f"{path}: cannot be read: {error}") from error


def _pooling(config: dict[str, Any]) -> PoolingKind:
    modes = [name for flag, name in _FLAGS.items() if config.get(flag)]
    mode = str(config.get("pooling_mode") or "+".join(modes))
    if mode not in _KINDS:
        raise ServeError(
            f"the pooling '{mode}' of sentence-transformers is not supported; there are {', '.join(_KINDS)}"
        )
    return _KINDS[mode]


def _width(model: torch.nn.Module) -> int | None:
    """Width of the states that are pooled: those before the output layer, or an encoder's last."""
    before = getattr(output_layer(model), "in_features", None) if generates(model) else None
    config: Any = model.config
    width = before or getattr(config.get_text_config(), "hidden_size", None)
    return width if isinstance(width, int) else None


def _is_causal(model: torch.nn.Module) -> bool:
    """Whether tokens attend to those before them only."""
    return any(getattr(module, "is_causal", False) for module in model.modules())
