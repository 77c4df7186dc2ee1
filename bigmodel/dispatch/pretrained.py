"""Load a transformers model by name: build it on meta, plan, load the weights to their devices, dispatch."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ..checkpoint import Checkpoint
from ..devices import HOST, DeviceLike
from ..devices.default_dtype import changing_default_dtype
from ..devices.empty import init_empty_weights
from ..errors import CheckpointFormatError
from ..plan import Plan
from ..profile.model.stage import cut_stage
from ..profile.model.tensors import torch_dtype
from ..profile.source import model_config, model_dtype
from ..profile.trace.dry_run import SampleInputs
from ..sources.gguf.model import SUFFIX as GGUF_SUFFIX
from ..sources.headers import TensorEntry
from ..sources.local import refuse_pipeline
from ..sources.resolve import open_source
from .attach.dispatched import dispatched
from .dispatch import place_and_attach
from .placement.fused_checkpoint import load_in_place
from .placement.options import Options, PlanArguments, dtype_of
from .placement.resolve import DeviceMap, resolve_device_map
from .placement.stored_weights import hold_as_stored


def from_pretrained(
    id_or_path: str | os.PathLike[str],
    device_map: DeviceMap = "auto",
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    main_device: DeviceLike | None = None,
    batch_size: int = 1,
    context_length: int | None = None,
    no_split_module_classes: Collection[str] | None = None,
    offload_buffers: bool | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    expert_cache: int | str | None = None,
    pinned_memory: int | str | None = None,
    offload: str | None = None,
    offload_dtype: str | None = None,
    host_kernels: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    per_pass: bool = True,
    sample_inputs: SampleInputs | None = None,
    padded: bool = True,
    draft_tokens: int = 0,
    draft: Plan | None = None,
    prefill_chunk_size: int | str | None = None,
    layers: tuple[int, int] | None = None,
) -> PreTrainedModel:
    """Load a transformers model from a folder or the Hub, placed by plan and dispatched.

    The model is built without memory and planned under the budgets. Each weight is then loaded to its planned device:
    copied to an accelerator, read into RAM, or left in the checkpoint as a view of the memory-mapped file.

    Args:
        id_or_path: A folder with config and weights, or a repository on the Hub.
        device_map: As for `dispatch_model`.
        max_memory: Budgets by device (bytes, or text such as ``"10GiB"``); None: the free memory.
        dtype: ``"auto"`` for the checkpoint's dtype, or the dtype of weights on their execution device.
        revision: Branch, tag or commit on the Hub.
        trust_remote_code: Run code of the repository. Leave it off for code that you have not read.
        main_device: Execution device of offloaded modules; None: as the plan has it.
        batch_size: Concurrent sequences that memory is planned for.
        context_length: Tokens per sequence that memory is planned for; None: the planner's default.
        no_split_module_classes: Classes whose modules are never split; None detects them.
        offload_buffers: Stream the buffers of offloaded modules too.
        offload_folder: Folder for weights mapped to ``"disk"`` that cannot be used in place (fused or ``.bin`` ones).
        expert_cache: As for `dispatch_model`.
        pinned_memory: As for `dispatch_model`.
        offload: As for `dispatch_model`.
        offload_dtype: As for `dispatch_model`.
        host_kernels: As for `dispatch_model`.
        token: Access token for the Hub.
        cache_dir: Folder of downloads; None: huggingface_hub's cache.
        local_files_only: Use only the cache; send no request.
        per_pass: With ``offload="auto"``, a module may be streamed for prompts and computed on the host in steps of
            generation; its keys and values then move between the two. False for callers that manage keys and values
            themselves, as the server does, whose attention gathers those of a layer.
        sample_inputs: As for `dispatch_model`.
        padded: Memory is planned for padded sequences too; False: no sequence is ever padded.
        prefill_chunk_size: Tokens of each forward in which `generate` runs a longer prompt, as for `plan`; "auto": as
            many as let an accelerator run the model.
        draft_tokens: As for `plan`: tokens that a caller proposes for each sequence of a step, at most.
        draft: As for `plan`: the plan of what proposes them.
        layers: Load a stage alone, the layers from the first number to before the second, as `run_over_nodes` does;
            None: all.

    Returns:
        The model in eval mode, with `hf_device_map`; `get_plan(model)` returns its plan.

    Raises:
        CheckpointError: The model does not exist, or its files are damaged.
        PlanError: The model does not fit the budgets, or an argument is invalid.
    """
    source = open_source(id_or_path, revision, token, cache_dir, local_files_only, trust_remote_code)
    checkpoint = source.fetch_weights()
    folder = _folder_of(checkpoint)
    planned = dtype_of(device_map) if isinstance(device_map, Plan) else None
    model = build_on_meta(folder, planned or dtype, trust_remote_code, checkpoint)
    if layers is not None:
        cut_stage(model, *layers)
    initialised = _initialise_unsaved(model, folder)
    arguments = PlanArguments.read(
        main_device=main_device,
        max_memory=max_memory,
        no_split_module_classes=no_split_module_classes,
        offload=offload,
        offload_buffers=offload_buffers,
        offload_dtype=offload_dtype,
        host_kernels=host_kernels,
        expert_cache=expert_cache,
        pinned_memory=pinned_memory,
        dtype=None if dtype == "auto" else torch_dtype(dtype),
    )
    resolved = resolve_device_map(
        model,
        device_map,
        arguments,
        per_pass=per_pass,
        batch_size=batch_size,
        context_length=context_length,
        sample_inputs=sample_inputs,
        padded=padded,
        prefill_chunk_size=prefill_chunk_size,
        draft_tokens=draft_tokens,
        draft=draft,
    )
    if offload_folder is None and checkpoint.suffix == GGUF_SUFFIX:
        offload_folder = tempfile.gettempdir()  # norms and biases that are computed when they are read
    load_in_place(
        model,
        checkpoint,
        device_map=resolved.keys,
        dtype=dtype_of(resolved.plan),
        offload_folder=offload_folder,
        offload_buffers=resolved.plan.offload_buffers,
        read_later=resolved.reads_ahead,
        upload_bytes=resolved.plan.upload_bytes,
    )
    options = Options(
        skip_keys=getattr(model, "_skip_keys_device_placement", None),
        no_split_module_classes=no_split_module_classes,
        align_memory=False,
    )
    if offload_folder is None and initialised:
        offload_folder = tempfile.gettempdir()  # what no checkpoint holds may be mapped to disk all the same
    place_and_attach(model, resolved, options, None if offload_folder is None else Path(offload_folder))
    return model.eval()


def get_plan(model: nn.Module) -> Plan | None:
    """Return the plan that `model` was dispatched by: the plan given, or the one made from its device map. None if it
    is not dispatched."""
    found = dispatched(model)
    return None if found is None else found.plan


def build_on_meta(
    folder: Path,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    weights: Path | None = None,
) -> PreTrainedModel:
    """Return the model that the config in `folder` describes, its parameters on meta, its buffers real.

    Args:
        folder: Folder of ``config.json``, or a GGUF file.
        dtype: ``"auto"`` for the config's dtype, else that of most bytes of the weights.
        trust_remote_code: Run code from `folder`.
        weights: The checkpoint, where it is not found in `folder`.

    Raises:
        CheckpointFormatError: transformers does not know the architecture, a config is damaged, or the weights are
            quantised in an unknown format.
        PlanError: `dtype` is none that a model computes in.
    """
    config = _config(folder, trust_remote_code)
    wanted = model_dtype(dtype, config, lambda: _entries(Checkpoint.open(weights or folder)))
    builder = _class_of(config, trust_remote_code)
    with changing_default_dtype(), init_empty_weights():
        model: PreTrainedModel = builder(config, dtype=wanted)
    model.tie_weights()
    hold_as_stored(model, folder)
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = _generation_config(folder)
    model.config.name_or_path = str(folder)
    return model


def _generation_config(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder)
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointFormatError(f"{folder}/generation_config.json: {error}") from error


def _entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    return map(checkpoint.entry, checkpoint)


def _folder_of(checkpoint: Path) -> Path:
    """Return the path that config and other files of a checkpoint are at: its folder, or a GGUF file itself."""
    return checkpoint if checkpoint.is_dir() or checkpoint.suffix == GGUF_SUFFIX else checkpoint.parent


def _config(folder: Path, trust_remote_code: bool) -> Any:
    if folder.suffix == GGUF_SUFFIX and folder.is_file():
        return model_config(open_source(folder))
    refuse_pipeline(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointFormatError(f"{folder}/config.json: {error}") from error


def _initialise_unsaved(model: PreTrainedModel, folder: Path) -> bool:
    """Initialise parameters that checkpoints of this architecture do not hold, such as sinusoidal positions, as the
    model's own code does; return whether there are any."""
    unsaved = re.compile("|".join(model._keys_to_ignore_on_load_missing or ()) or r"(?!)")
    if not any(unsaved.search(name) for name, _ in model.named_parameters()):
        return False
    initialised = False
    saved = Checkpoint.open(folder)
    for prefix, module in model.named_modules():
        own = {key: f"{prefix}.{key}" for key, _ in module.named_parameters(recurse=False)}
        if not own or not all(unsaved.search(name) and name not in saved for name in own.values()):
            continue
        for key in own:
            empty = module._parameters[key]
            assert empty is not None
            module._parameters[key] = nn.Parameter(torch.empty_like(empty, device=HOST), empty.requires_grad)
        with torch.no_grad():
            model._init_weights(module)
        initialised = True
    return initialised


def _class_of(config: Any, trust_remote_code: bool) -> Any:
    """Return a function that builds the architecture `config` names, or a causal language model if it names none."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        architecture = getattr(transformers, name, None)
        if isinstance(architecture, type) and issubclass(architecture, PreTrainedModel):
            return architecture._from_config
    if trust_remote_code:
        return lambda config, dtype: AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=True)
    return AutoModelForCausalLM.from_config
