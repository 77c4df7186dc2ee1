"""Dispatch a model over devices (`dispatch_model`), dispatch it again by another map, and undo that (`undispatch`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..arguments import check_model
from ..devices import HOST, DeviceLike, torch_device
from ..errors import DispatchError
from ..plan import Plan
from ..profile.trace.dry_run import SampleInputs
from .attach.activation_guard import ActivationGuard
from .attach.apart import note_apart
from .attach.builder import Builder
from .attach.copying import CopyDispatched
from .attach.dispatched import dispatched
from .placement.aligned import with_aligned_copies
from .placement.measured import kept_in_memory
from .placement.offload_files import fill_meta, write_to_disk
from .placement.options import Options, PlanArguments, dtype_of
from .placement.packed import with_unmapped_tensors
from .placement.resolve import DeviceMap, ResolvedMap, map_of_plan, resolve_device_map, resolve_given, whole_classes
from .placement.unsupported import refuse_gradients, refuse_unsupported
from .weights.parameters import (
    forget_second_places,
    moved_in_place,
    parts_with_dtype,
    refresh_references,
    refresh_second_places,
)


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap = "auto",
    main_device: DeviceLike | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Mapping[str, str]] | None = None,
    offload_buffers: bool | None = None,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    expert_cache: int | str | None = None,
    pinned_memory: int | str | None = None,
    offload: str | None = None,
    offload_dtype: str | None = None,
    host_kernels: str | None = None,
    sample_inputs: SampleInputs | None = None,
    micro_batch_size: int | None = None,
) -> nn.Module:
    """Distribute `model` over devices and return it; its calls and outputs stay the same.

    Modules mapped to an accelerator are stored and run there. Modules mapped to ``"cpu"`` or ``"disk"`` keep their
    weights in host memory or in the memory-mapped checkpoint; they run on `main_device`, or where a plan has them run,
    to which their weights are streamed just in time, or, if the map has no accelerator, on the host without any copy.

    Everything that decides bytes or seconds is read from the model's plan (`get_plan`): the plan given, or one made
    here from the map and the arguments. An argument that contradicts a given plan is refused.

    Args:
        model: Any module. Weights on ``meta`` are filled from `state_dict`, `offload_index` or `offload_dir`.
        device_map: ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, one device, a mapping of module
            name to device (``""`` is the whole model), or a `Plan`.
        main_device: Execution device of offloaded modules. None: the first accelerator of the map, else the host; of a
            plan, those that it names, which may be several accelerators in turns.
        state_dict: Weights for parameters that are on ``meta``.
        offload_dir: A folder for weights mapped to ``"disk"`` that are not in a memory-mapped file yet; also a
            checkpoint to fill parameters on ``meta`` from.
        offload_index: ``safetensors_file`` and ``weight_name`` of each parameter on ``meta``.
        offload_buffers: Stream the buffers of offloaded modules too; by default (None: the plan's value, else False)
            they stay on the execution device.
        skip_keys: Keyword arguments of forward that are not moved between devices.
        preload_module_classes: More classes whose weights are streamed as a whole.
        force_hooks: Move inputs to the device and outputs back even for a model that is on one device: for models of
            a pipeline, each on an accelerator of its own, of which one is given what another has computed.
        max_memory: Budgets by device (bytes or text), for the named strategies; None: the free memory.
        no_split_module_classes: Classes whose modules are never split; None detects them.
        expert_cache: Memory of each device (bytes, or text such as ``"4GiB"``) for offloaded experts of mixture
            layers: only the experts that the router chooses are fetched, and those most likely to be chosen again stay.
            None: the bytes that streaming whole layers would take.
        pinned_memory: Host memory (bytes, or text such as ``"16GiB"``) that may be pinned, from which a GPU copies at
            full speed; weights beyond it are copied from pageable memory. None: half of the host's memory.
        offload: How modules mapped to ``"cpu"`` or ``"disk"`` run beside an accelerator: ``"stream"`` copies their
            weights to it, ``"compute"`` copies their inputs to the host and computes there, ``"auto"`` (with
            ``device_map="auto"``) chooses the faster for each by this machine's speeds, which are measured once. The
            choice may differ for prompts and for steps of generation: the module's keys and values in transformers'
            caches then move between the two. None: as a given `Plan` has it, else ``"stream"``. Outputs computed on
            the host may differ from those of the accelerator in the last bits.
        offload_dtype: ``"int8"`` or ``"int4"``: streamed weights cross the link as such integers and are restored on
            the accelerator, a quarter or an eighth of the bytes of float32. Needs torchao; for inference only. Outputs
            then differ from those of the whole model (every other option is bitwise exact); `quantization_errors`
            returns the error of each weight. The model's own weights stay exact for `state_dict`, saving and
            `undispatch`. Quantised copies take host memory in addition, or, for weights mapped to ``"disk"``, a file
            in `offload_dir`. Experts fetched one by one, lookup tables, buffers and vectors are not quantised.
        host_kernels: ``"packed"``: modules mapped to ``"cpu"`` that the host computes in every call compute with
            weights published in int4 or int8 by kernels that take them packed, and do not restore them in each step of
            generation: several times faster. Outputs are those of the kernels, not bit for bit those of restored
            weights. ``"exact"``: they are restored. None: as a given `Plan` has it, else ``"exact"``.
        micro_batch_size: Where all parts are resident on several accelerators: forwards of more rows are computed in
            micro-batches of so many, several of which are on their ways through the accelerators at once. Each has the
            bits of a forward of its rows alone, which may differ in the last bits from those of all rows at once. Calls
            for gradients, or with a cache of keys and values, are computed whole. None: as a given `Plan` has it, else
            every call is.

    Returns:
        The same `model`, with `hf_device_map` set and its parameters the objects that they were, wherever their values
        are now; a weight that was tied and gets several devices is a new one on all but one. `undispatch` restores the
        plain model.

    Raises:
        DeviceError: The map or `main_device` names an accelerator that this machine does not have.
        DeviceMapError: The map does not cover the model or contains an invalid device.
        BudgetError: The model does not fit `max_memory`.
        PlanError: `offload` or `offload_dtype` has an invalid value, or an argument contradicts the plan.
        DispatchError: A parameter has no value or no shape, holds a gradient and is to be moved, or must be
            written to disk and cannot, or `offload_dir` is None; torchao is missing; the model is dispatched already
            and a forward of it is running.
    """
    check_model(model)
    _refuse_lazy(model)
    classes = whole_classes(model, no_split_module_classes, preload_module_classes)
    arguments = PlanArguments.read(
        main_device=main_device,
        max_memory=max_memory,
        no_split_module_classes=classes,
        offload=offload,
        offload_buffers=offload_buffers,
        offload_dtype=offload_dtype,
        host_kernels=host_kernels,
        expert_cache=expert_cache,
        pinned_memory=pinned_memory,
        micro_batch_size=micro_batch_size,
    )
    resolved = resolve_device_map(model, device_map, arguments, sample_inputs=sample_inputs)
    options = Options(skip_keys=skip_keys, no_split_module_classes=classes, force_hooks=force_hooks)
    fill_meta(model, state_dict, offload_index, offload_dir)
    return place_and_attach(model, resolved, options, offload_dir)


def place_and_attach(
    model: nn.Module, resolved: ResolvedMap, options: Options, offload_dir: str | Path | None = None
) -> nn.Module:
    """Dispatch a model without weights on meta by a resolved map."""
    is_dispatched = dispatched(model) is not None
    refuse_gradients(model, resolved.placement, from_host=is_dispatched)
    if is_dispatched:
        undispatch(model)
    if resolved.plan.guarded and offload_dir is None:
        resolved = kept_in_memory(model, resolved)
    refuse_unsupported(model, resolved.placement, options.force_hooks)
    with lasting_tensors():
        write_to_disk(model, resolved.placement, offload_dir)
        if offload_dir is not None:
            options = replace(options, offload_folder=Path(offload_dir))
        for part, dtype in parts_with_dtype(model).values():
            # What the forward around it would do, and cannot do to a dispatched model.
            part.to(dtype_of(resolved.plan) or dtype).to(dtype)
        _attach(model, resolved, options)
    note_apart(model)
    return model


def redispatch(model: nn.Module, device_map: Mapping[str, DeviceLike]) -> None:
    """Dispatch a dispatched model by another map, with the same options; only tensors whose device changes are moved.

    On failure it is left as a plain model, with its weights on their previous devices.
    """
    found = dispatched(model)
    assert found is not None
    found.refuse_while_running()
    found.detach(model)
    found.release()
    before = found.resolved
    arguments = replace(PlanArguments.of(before.plan), no_split_module_classes=found.options.no_split_module_classes)
    moved = resolve_given(model, device_map, arguments, before.execution, before.computed_below)
    with lasting_tensors():
        _attach(model, moved, found.options)


def _follow_plan(model: nn.Module, plan: Plan) -> None:
    """Dispatch a model by the plan that follows its guarded one. On failure it stays dispatched as it was."""
    found = dispatched(model)
    assert found is not None
    before, options = found.resolved, found.options
    entries = (found.attachments[""], *(each for each in found.outside if each.module is model))
    if any(each.moved_inputs for each in entries):
        options = replace(options, force_hooks=True)  # callers rely on inputs being moved
    found.detach(model)
    found.release()
    with lasting_tensors():
        try:
            resolved = map_of_plan(model, plan, before.arguments)
            if options.offload_folder is None:
                resolved = kept_in_memory(model, resolved)
            else:
                write_to_disk(model, resolved.placement, options.offload_folder)
            _attach(model, resolved, options)
        except BaseException:
            _attach(model, before, found.options)
            raise


def _attach(model: nn.Module, resolved: ResolvedMap, options: Options) -> None:
    if options.align_memory and not resolved.aligned:
        resolved = with_aligned_copies(model, resolved)
    resolved = with_unmapped_tensors(model, resolved)
    result = Builder(model, resolved, options).build()
    result.attach(model)
    model.__dict__["__deepcopy__"] = CopyDispatched(model, _dispatch_copy)
    if result.attachments:
        result.guard(model)
    if resolved.plan.guarded and result.attachments:  # without, nothing can be placed anew
        ActivationGuard(model, result, _follow_plan).attach()
    result.observe(model)


def _dispatch_copy(model: nn.Module, resolved: ResolvedMap, options: Options) -> None:
    """Dispatch the copy of a dispatched model, whose weights on disk may have been copied to memory."""
    with lasting_tensors():
        if options.offload_folder is not None:
            write_to_disk(model, resolved.placement, options.offload_folder)
        _attach(model, resolved, options)


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise DispatchError(
                f"{name} belongs to a lazy module and has no shape yet: run one forward before dispatching the model"
            )


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """Create normal tensors (no inference tensors), by default on the host, whatever the caller's inference mode and
    default device: they outlive the caller."""
    host = torch_device(HOST)
    # A default device slows down every call of PyTorch, also reading a tensor's shape: none is set without need.
    with torch.inference_mode(False), nullcontext() if torch.get_default_device() == host else host:
        yield


def undispatch(model: nn.Module, device: DeviceLike | None = None) -> nn.Module:
    """Restore the plain model: no attachments, no streams, every weight a plain tensor.

    Args:
        model: A dispatched model; a plain one is returned as it is.
        device: Target device of the weights. None: a model on one device stays there, any other moves to the host.
            Weights on disk stay views of their memory-mapped file.

    Raises:
        DispatchError: A forward of the model is running.
    """
    found = dispatched(model)
    if found is None:
        return model
    found.refuse_while_running()
    found.detach(model)
    tensors = [*model.parameters(), *model.buffers()]
    if device is None and len({tensor.device for tensor in tensors}) <= 1:
        return model
    target = torch_device(HOST if device is None else device)
    with lasting_tensors():
        _gather(model, target, found.ties)
        refresh_references(found.references)
    return model


def _gather(model: nn.Module, target: torch.device, ties: Mapping[str, str]) -> None:
    """Move every tensor to `target`; restore the ties of tensors that were tied before dispatching."""
    forget_second_places(model)
    moved: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is None:
                    continue
                first = ties.get(dot + key, dot + key)
                if first not in moved:
                    moved[first] = moved_in_place(tensor, target)
                registry[key] = moved[first]
    refresh_second_places(model)
