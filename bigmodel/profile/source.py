"""The profile of a model in a folder or on the Hub, from config and headers alone: no weight is read and no remote
code is run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..devices.default_dtype import changing_default_dtype
from ..errors import PlanError
from ..quantized.recognise import quantization_config
from ..quantized.replace import use_stored_weights
from ..sources.headers import TensorEntry
from ..sources.local import ModelSource
from ..sources.resolve import open_source
from .model.tensors import DtypeLike, dtype_name, normalize_dtype, torch_dtype
from .profile import Profile, profile_model
from .trace.workload import text_config


def profile_source(
    id_or_path: str | os.PathLike[str],
    dtype: DtypeLike = "auto",
    revision: str | None = None,
    **shapes: Any,
) -> Profile:
    """Profile a model in a folder or on the Hub, reading only its config and safetensors headers.

    Args:
        id_or_path: a folder or a repository on the Hub.
        dtype: dtype that weights are loaded as; "auto": the config's, else that of most bytes of the checkpoint.
        revision: branch, tag or commit of a repository.
        **shapes: further arguments of `profile_model`: `batch_size`, `context_length`, `new_tokens`, ...

    Raises:
        PlanError: transformers does not know the architecture, or a shape is invalid.
        CheckpointError: the model does not exist, or has no safetensors.
    """
    profile = profile_model(meta_model(open_source(id_or_path, revision), dtype), **shapes)
    return profile if dtype == "auto" else replace(profile, dtype=dtype_name(torch_dtype(dtype)))


def meta_model(source: ModelSource, dtype: DtypeLike = "auto") -> nn.Module:
    """Return the model of `source` on the meta device, in the dtypes it will be loaded as.

    Raises:
        PlanError: transformers does not know the architecture, or weights cannot be loaded as `dtype`.
        CheckpointError: the source has no config or no safetensors.
    """
    config = model_config(source)
    source.weight_files()  # refuses a source that cannot be loaded
    wanted = model_dtype(dtype, config, partial(_entries, source))
    model_class = _model_class(config, source.name)
    with changing_default_dtype(), torch.device("meta"), _Uninitialised():
        model: nn.Module = model_class._from_config(config, dtype=wanted)
    if quantization_config(source.config_dict()) is not None:
        sample = source.sampled_headers()
        if sample is not None:
            use_stored_weights(model, source.config_dict(), sample.entries, source.name, experts=sample.experts)
        else:
            entries = {name: entry for header in source.headers().values() for name, entry in header.items()}
            use_stored_weights(model, source.config_dict(), entries, source.name)
    return model


class _Uninitialised(TorchFunctionMode):
    """Leaves new tensors as they are where `torch.nn.init` would fill them: on meta there is nothing to fill."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def model_config(source: ModelSource) -> Any:
    """Return the transformers config of `source`.

    Raises:
        PlanError: its `model_type` is missing or unknown to transformers, or a value in it is invalid.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    content = dict(source.config_dict())
    model_type = content.pop("model_type", None)
    if not isinstance(model_type, str):
        raise PlanError(f"{source.name}: config.json names no model_type, so the architecture is unknown")
    if model_type not in CONFIG_MAPPING:
        import transformers

        raise PlanError(
            f"{source.name}: transformers {transformers.__version__} does not know the architecture {model_type!r}; "
            "a newer release may; code from the repository is not run"
        )
    try:
        return AutoConfig.for_model(model_type, **_with_floats(content))
    except ValueError as error:
        raise PlanError(f"{source.name}: config.json is not a valid config of {model_type!r} ({error})") from error


def _model_class(config: Any, name: str) -> Any:
    import transformers

    for architecture in getattr(config, "architectures", None) or ():
        found = getattr(transformers, architecture, None)
        if found is not None:
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise PlanError(f"{name}: transformers has no model for {type(config).__name__}")


def _with_floats(value: Any) -> Any:
    """Return JSON content with the floats that transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(member) for key, member in value.items()}
    return [_with_floats(member) for member in value] if isinstance(value, list) else value


def _entries(source: ModelSource) -> Iterator[TensorEntry]:
    return (entry for header in source.headers().values() for entry in header.values())


def model_dtype(dtype: DtypeLike, config: Any, entries: Callable[[], Iterable[TensorEntry]]) -> torch.dtype:
    """Return the dtype that a model is built in.

    Args:
        dtype: the one asked for; "auto": the config's, else the floating point dtype of most bytes of the checkpoint.
        config: the model's config, of transformers.
        entries: returns what the checkpoint's headers say of its tensors. It is called where the config names no dtype:
            a model on the Hub may have hundreds of files.

    Raises:
        PlanError: it is no floating point dtype, or one of 8 bits: quantised weights are restored to another.
    """
    found = _auto_dtype(config, entries) if dtype == "auto" else torch_dtype(dtype)
    if found.itemsize == 1:
        raise PlanError(f"a model does not compute in {dtype_name(found)}; give a wider dtype, such as 'bfloat16'")
    return found


def _auto_dtype(config: Any, entries: Callable[[], Iterable[TensorEntry]]) -> torch.dtype:
    declared = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    if isinstance(declared, str):
        declared = normalize_dtype(declared)
    if isinstance(declared, torch.dtype):
        return declared
    nbytes: Counter[torch.dtype] = Counter()
    for entry in entries():
        if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:
            nbytes[entry.dtype] += entry.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else torch.float32
