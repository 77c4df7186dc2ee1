"""Loading of transformers' models by this project's plans: what stands in the place of three functions of transformers.

`from_pretrained(device_map="auto")` of transformers asks where each module goes, reads each weight to its place, and
has the model dispatched. Here it gets a plan's places (`device_map_of`). Weights that the plan keeps on the host, and
that are used as they are in the file, transformers leaves on disk (`index_of`): they become views of the
mapped checkpoint, and are neither read nor written again. Then the model is dispatched by the plan (`dispatch`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..devices import DISK, HOST, format_size, torch_device
from ..dispatch.attach.mark import is_dispatched
from ..dispatch.placement.options import Options, PlanArguments
from ..dispatch.placement.resolve import resolve_device_map
from ..errors import BigModelError
from ..plan import STRATEGIES, Plan, plan
from ..profile.model.tensors import dtype_name, owner_of
from .dispatching import cast_on_device, dispatch_as_stored, fill_from_index, with_hooks
from .record import RECORD
from .ties import keep_ties_in_memory, read_ties_from_one_place, ties_made
from .workload import workload

_plans: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()
"""The plans of models that are being loaded."""


def device_map_of(
    original: Callable[..., Any], model: Any, device_map: Any, max_memory: Any, hf_quantizer: Any
) -> Mapping[str, Any]:
    """Return where each module is loaded to: a plan's places, for a named strategy; a given map is left as it is.

    The plan counts weights, slots, and what the sequences of the `workload` take.

    Raises:
        PlanError: A variable of the workload is no number.
    """
    if not isinstance(device_map, str) or device_map not in STRATEGIES:
        return original(model, device_map, max_memory, hf_quantizer)
    name = type(model).__name__
    if hf_quantizer is not None:
        RECORD.fallbacks.append((name, "planned by transformers: its weights are quantised by transformers"))
        return original(model, device_map, max_memory, hf_quantizer)
    batch_size, context_length = workload()
    try:
        with ties_made(model):
            made = plan(
                model,
                max_memory,
                strategy=device_map,
                batch_size=batch_size,
                context_length=context_length,
            )
    except BigModelError as error:
        RECORD.fallbacks.append((name, f"planned by transformers: {error}"))
        return original(model, device_map, max_memory, hf_quantizer)
    places: dict[str, Any] = dict(made.device_map)
    if made.main_device != HOST and len(set(places.values())) > 1:
        _plans[model] = made
        places = {key: DISK if device == HOST else device for key, device in places.items()}
    else:
        keep_ties_in_memory(model, places)
    RECORD.plans.append((name, summary(made)))
    return places


def index_of(
    original: Callable[..., Any],
    model: Any,
    disk_offload_folder: str | None,
    checkpoint_files: list[str] | None,
    device_map: MutableMapping[str, Any],
    sharded_metadata: Any,
    weight_mapping: Any,
) -> Any:
    """Return where the weights on disk lie; have those read that the plan keeps in memory but that must be converted.

    What a plan has on disk and must be converted, transformers writes to the offload folder. What is loaded into a
    model that is dispatched, as adapters are, is read into its parameters, which are in memory also where the map says
    disk.
    """
    index = original(model, disk_offload_folder, checkpoint_files, device_map, sharded_metadata, weight_mapping)
    if is_dispatched(model):
        device_map.update(dict.fromkeys(index, HOST))
        return {}
    made = _plans.get(model)
    if made is None:
        return index
    converted = _targets_of_conversions(weight_mapping)
    planned = made.device_map
    for name in model.state_dict():
        owner = owner_of(name, planned)
        if owner is None or planned[owner] != HOST:
            continue
        if name not in index or any(pattern.search(name) for pattern in converted):
            index.pop(name, None)
            device_map[name] = HOST
    read_ties_from_one_place(model, device_map, index)
    return index


def dispatch(
    original: Callable[..., Any],
    model: Any,
    hf_quantizer: Any,
    device_map: Mapping[str, Any],
    offload_folder: str | None,
    offload_index: Mapping[str, Any] | None,
    offload_buffers: bool,
) -> None:
    """Dispatch a loaded model: by its plan, if it has one."""
    made = _plans.pop(model, None)
    if made is None:
        original(model, hf_quantizer, device_map, offload_folder, offload_index, offload_buffers)
        return
    dtype = cast_on_device(model, offload_index)
    fill_from_index(model, offload_index, None, leave_uncast=dtype is not None)
    if dtype is not None:
        made = replace(made, dtype=dtype_name(dtype))
    options = Options(skip_keys=getattr(model, "_skip_keys_device_placement", None))
    # The budgets of others are of weights: what a call takes beyond its plan has to fit the device alone.
    resolved = replace(resolve_device_map(model, made, PlanArguments()), are_budgets_given=False)
    dispatch_as_stored(model, resolved, options, offload_folder)
    with_hooks(model)


def summary(made: Plan) -> str:
    """Return a plan in one line: the bytes of weights on each device, and what it was made for."""
    held = ", ".join(
        f"{format_size(device.weights)} on {key}" for key, device in made.devices.items() if device.weights
    )
    how = "guarded" if made.guarded else f"{made.batch_size} x {made.context_length} tokens"
    places = set(made.device_map.values())
    if len(places) == 1:
        return f"{held}; nothing is attached, so inputs have to be on {torch_device(places.pop())}; {how}"
    return f"{held}; {len(made.streamed)} parts are streamed through {made.slots} slots; {how}"


def _targets_of_conversions(weight_mapping: Iterable[Any] | None) -> list[re.Pattern[str]]:
    """Return patterns of the names whose weights transformers computes from those in the file."""
    from transformers.core_model_loading import WeightConverter

    converters = [entry for entry in weight_mapping or () if isinstance(entry, WeightConverter)]
    return [re.compile(target) for converter in converters for target in converter.target_patterns]
