"""Build the dispatched form of a model from its plan: move resident tensors, build streamed blocks, attach forwards.

Weights on disk that the host computes with are paged in ahead of their module's forward (`attach_read_ahead`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from ...checkpoint import mapped_region, run_dtype
from ...checkpoint.pages import aligned_copy
from ...devices import DISK, HOST, is_accelerator, torch_device
from ...errors import DeviceMapError, DispatchError
from ...plan import Plan
from ...profile import expert_names, storage_key
from ...profile.model.units import is_indivisible
from ...quantized.stored import stored_names
from ..experts.layer import ExpertLayer
from ..mapped.mapped_block import MappedBlock, Owner
from ..mapped.readahead import ReadAhead
from ..placement.aligned import misaligned
from ..placement.dispatch_units import dispatch_units_of_parts
from ..placement.options import Options, dtype_of
from ..placement.packed import pack, packed_layers
from ..placement.resolve import ResolvedMap
from ..placement.tensors import PlacedTensor
from ..transfer.files import SourceFiles
from ..weights.block import Block, HostTensor
from ..weights.casts import cast_parts
from ..weights.parameters import (
    forget_second_places,
    moved_like,
    parts_with_dtype,
    references_to_weights,
    refresh_references,
    refresh_second_places,
    second_places,
)
from .align import Aligner
from .dispatched import Dispatched, UndoLog
from .expert_builder import ExpertBuilder
from .host_kv import keep_kv_on_host
from .pinned_memory import PinnedBudget
from .stages import divide_batches, mark_stages
from .stream_builder import StreamBuilder, quantized


class Builder:
    """Dispatches one model. `build` either finishes or leaves the model as it was."""

    def __init__(self, model: nn.Module, resolved: ResolvedMap, options: Options) -> None:
        self.model = model
        self.resolved = resolved
        self.placement = resolved.placement
        self.options = options
        self.plan = resolved.plan
        self.main = torch_device(self.placement.main_device)
        self.undo_log = UndoLog()
        self.pinned = PinnedBudget(self.main, self.plan.pinned_memory, _spare_bytes(self.plan))
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.placed: dict[str, PlacedTensor] = {p.name: p for p in self.placement.tensors(model)}
        self.units = dispatch_units_of_parts([part.name for part in self.plan.parts], self.modules, self.placed)
        self._with_own_dtype = parts_with_dtype(model).keys()
        self._as_stored = stored_names(model)
        self._moved: dict[tuple[object, torch.device], torch.Tensor] = {}
        self._kept: set[int] = set()
        """Parameters, by identity, that were moved and are the same objects."""

    def build(self) -> Dispatched:
        """Move resident tensors, prepare streamed blocks, and return the attachments, not yet attached."""
        result = Dispatched(self.main, self.resolved, self.options, frozenset(self.placed))
        result.ties = self._ties()
        result.references = references_to_weights(self.model)
        try:
            self._refuse_meta()
            self._refuse_torn_modules()
            self._refuse_casts_from_outside()
            result.hold_allocators()
            forget_second_places(self.model)
            self._move_residents()
            if self.options.align_memory:
                self._align(result)
            refresh_second_places(self.model)
            # A local: as an attribute it would make a reference cycle, which keeps replaced weights alive.
            experts = ExpertBuilder(
                self.modules, self.placed, self.placement, self._device_dtype, self._needs_streaming
            )
            layers = experts.find()
            blocks = self._blocks(result, layers)
            streams = StreamBuilder(
                self.modules, self.placed, self.units, self.plan, self.pinned, self.options.offload_folder
            )
            streams.attach(blocks, result)
            experts.attach(layers, result, self.plan, self.pinned)
            refresh_references(result.references)
            divide_batches(self.model, self.plan, result)
            Aligner(self.modules, self.placed, self.placement, self.units, self.plan, self.options).align(result)
            self._pack(result)
            self._read_ahead(blocks, result)
            keep_kv_on_host(self.modules, self.plan, self.pinned, result, self.options.offload_folder)
            mark_stages(self.plan, result)
        except BaseException:
            forget_second_places(self.model)
            self.undo_log.undo()
            result.unpack()
            refresh_second_places(self.model)
            refresh_references(result.references)
            raise
        return result

    def _refuse_meta(self) -> None:
        meta = [p.name for p in self.placed.values() if p.tensor.is_meta]
        if meta:
            shown = ", ".join(meta[:3]) + (f" and {len(meta) - 3} more" if len(meta) > 3 else "")
            raise DispatchError(
                f"{shown}: no value yet (device meta). Load the checkpoint first with load_checkpoint_in_model, "
                "or use load_checkpoint_and_dispatch"
            )

    def _refuse_torn_modules(self) -> None:
        """Raise for a module whose own tensors have different execution devices."""
        first: dict[str, PlacedTensor] = {}
        for placed in self.placed.values():
            owner = placed.name.rpartition(".")[0]
            other = first.setdefault(owner, placed)
            if other.execution_device != placed.execution_device:
                raise DeviceMapError(
                    f"the device map has {other.name} run on {other.execution_device} and "
                    f"{placed.name} on {placed.execution_device}, "
                    f"but one module computes with both; map {owner!r} whole"
                )
        for name, module in self.modules.items():
            if is_indivisible(module):
                self._refuse_cut(name, module)

    def _refuse_cut(self, name: str, module: nn.Module) -> None:
        """Raise for a module that uses weights of its children itself, and whose weights have different devices."""
        tensors = [f"{name}.{key}" if name else key for key, _ in module.named_parameters(remove_duplicate=False)]
        devices = {self.placed[tensor].execution_device for tensor in tensors}
        if len(devices) > 1:
            raise DeviceMapError(
                f"the device map spreads {name!r}, a {type(module).__name__}, over {', '.join(sorted(devices))}, "
                "but it computes with weights of its children itself; map it whole"
            )

    def _refuse_casts_from_outside(self) -> None:
        """Raise for streamed modules that another module casts before they are called."""
        offloads = {
            unit.name: [placed for name in unit.tensors if (placed := self.placed[name]).offloaded]
            for unit in self.units
            if not unit.encloses
        }
        for cast in cast_parts(self.model) if any(offloads.values()) else ():
            for name, tensors in offloads.items():
                is_inside = name != cast.by and f"{name}.".startswith(f"{cast.name}." if cast.name else "")
                first = next((each for each in tensors if is_inside and cast.changes(each.tensor)), None)
                if first is not None and is_accelerator(first.execution_device):
                    raise DispatchError(
                        f"the forward of {cast.by or type(self.model).__name__!r} casts {first.name} to "
                        f"{str(cast.dtype).removeprefix('torch.')}, which would be streamed and is not on the device "
                        "yet: cast it before the model is dispatched, or map it to an accelerator"
                    )

    def _ties(self) -> dict[str, str]:
        first: dict[object, str] = {}
        names = [(first.setdefault(storage_key(p.tensor), p.name), p.name) for p in self.placed.values()]
        return {name: earliest for earliest, name in names if name != earliest}

    def _move_residents(self) -> None:
        """Move every tensor to its storage device; offloaded tensors move to the host.

        Parameters stay the objects that they are. One that was tied and gets several devices stays so in one place.
        """
        host = torch_device(HOST)
        between = {name: self._device_between_forwards(placed) for name, placed in self.placed.items()}
        devices: dict[int, set[torch.device]] = {}
        for name, placed in self.placed.items():
            devices.setdefault(id(placed.tensor), set()).add(between[name])
        for name, placed in self.placed.items():
            runs_on = torch_device(placed.execution_device)
            if between[name] == host and runs_on in devices[id(placed.tensor)]:
                between[name] = runs_on  # it is there for another module, and is used for both
        on_host = {id(placed.tensor) for name, placed in self.placed.items() if between[name] == host}
        stays = {id(placed.tensor) for name, placed in self.placed.items() if between[name] == placed.tensor.device}
        leaves = {id(placed.tensor) for name, placed in self.placed.items() if between[name] != placed.tensor.device}
        copied = on_host | (stays & leaves)
        for name, placed in self.placed.items():
            self._move(placed, between[name], in_place=id(placed.tensor) not in copied)

    def _align(self, result: Dispatched) -> None:
        """Copy weights that the host computes with to aligned addresses, all names of a tied one together."""
        found = {
            storage_key(placed.tensor): placed.storage_device == DISK
            for placed in misaligned(self.model, self.placed.values())
            if placed.storage_device == HOST or placed.name in self.resolved.aligned
        }
        tensors = {id(placed.tensor): placed.tensor for placed in self.placed.values()} if found else {}
        copies: dict[object, torch.Tensor] = {}
        for tensor in tensors.values():
            key = storage_key(tensor)
            if key in found:
                with torch.inference_mode(tensor.is_inference()):
                    if key not in copies:
                        copies[key] = aligned_copy(tensor)
                    if found[key]:
                        result.aligned.append((tensor, tensor.data))
                    self.undo_log.replace_data(tensor, copies[key])

    def _pack(self, result: Dispatched) -> None:
        """Pack the weights that the host computes packed."""
        for name, layer, _ in packed_layers(self.model, self.placed, self.plan):
            result.packed[name] = layer, pack(layer)

    def _device_between_forwards(self, placed: PlacedTensor) -> torch.device:
        if not placed.offloaded:
            return torch_device(placed.storage_device)
        if placed.is_buffer and not (self.plan.offload_buffers or placed.computed_below):
            return torch_device(placed.execution_device)
        return torch_device(HOST)

    def _move(self, placed: PlacedTensor, device: torch.device, in_place: bool) -> None:
        tensor = placed.registry[placed.key]
        dtype = self._device_dtype(placed, tensor) if not placed.offloaded else tensor.dtype
        if tensor.device == device and tensor.dtype == dtype:
            self._moved.setdefault((storage_key(tensor), device), tensor)
            return
        before = storage_key(tensor), device
        known = self._moved.get(before)
        if known is None:
            known = moved_like(tensor, device, dtype)
            if in_place and id(tensor) not in self._kept and self.undo_log.take_over(tensor, known):
                self._kept.add(id(tensor))
                known = self._moved[storage_key(tensor), device] = tensor
            self._moved[before] = known
        self.undo_log.replace(placed.registry, placed.key, known)

    def _device_dtype(self, placed: PlacedTensor, tensor: torch.Tensor) -> torch.dtype:
        own = placed.name.rpartition(".")[0] in self._with_own_dtype or placed.name in self._as_stored
        if own or placed.is_buffer or not tensor.is_floating_point():
            return tensor.dtype
        return dtype_of(self.plan) or run_dtype(tensor)  # a file may have other dtypes than its model

    def _needs_streaming(self, placed: PlacedTensor) -> bool:
        tensor = placed.registry[placed.key]
        device = torch_device(placed.execution_device)
        if not placed.offloaded or tensor.device == device:
            return placed.offloaded and self._device_dtype(placed, tensor) != tensor.dtype
        resident = self._moved.get((storage_key(tensor), device))
        if resident is not None:
            # A tied tensor is on the device already and is used for both.
            self.undo_log.replace(placed.registry, placed.key, resident)
            return False
        return True

    def _blocks(self, result: Dispatched, layers: Mapping[str, ExpertLayer]) -> list[tuple[str, Block, bool]]:
        """Return the streamed blocks: module name, block, and whether it encloses other blocks."""
        blocks = []
        one_by_one = {f"{name}.{key}": layer.tensors[key] for name, layer in layers.items() for key in layer.names}
        for name, names, encloses in self.units:
            others = [self.placed[n] for n in names if n not in one_by_one]
            streamed = [placed for placed in others if self._needs_streaming(placed)]
            if not streamed:
                continue
            module = self.modules[name]
            if type(module) is nn.Embedding and not encloses and module.max_norm is None:
                # The lookup runs on the host, so that rows cross the link and not the whole table.
                forward = result.forward_of(name, module)
                forward.weights_on_host = True
                forward.device, forward.output_device = torch_device(HOST), self.main
                forward.output_dtype = self._device_dtype(streamed[0], module.weight)
                continue
            if not encloses and _makes_weights_before_forward(module) and self.main != torch_device(HOST):
                forward = result.forward_of(name, module)
                forward.weights_on_host = True
                forward.device = torch_device(streamed[0].execution_device)
                continue
            block = self._block(name, streamed)
            if not encloses:
                block = quantized(block, self.plan.offload_dtype)
            block.nested = [one_by_one[n] for n in names if n in one_by_one]
            blocks.append((name, block, encloses))
        return blocks

    def _block(self, name: str, streamed: list[PlacedTensor]) -> Block:
        tensors: dict[object, HostTensor] = {}
        for placed in streamed:
            tensor = placed.registry[placed.key]
            dtype = self._device_dtype(placed, tensor)
            found = HostTensor(tensor, dtype, is_buffer=placed.is_buffer, name=placed.name)
            host = tensors.setdefault(storage_key(tensor), found)
            host.owners.append((placed.registry, placed.key))
            host.second_places += second_places(self.modules[placed.name.rpartition(".")[0]], placed.key)
        return Block(name, list(tensors.values()))

    def _read_ahead(self, blocks: list[tuple[str, Block, bool]], result: Dispatched) -> None:
        """Attach read-ahead to modules that compute on the host with weights on disk."""
        streamed = {(id(r), key) for _, block, _ in blocks for t in block.tensors for r, key in t.owners}
        moved = {name for name, p in self.placed.items() if (id(p.registry), p.key) in streamed}
        fetched = [name for name, forward in result.attachments.items() if forward.compute is not None]
        moved |= {f"{name}.{key}" for name in fetched for key in self.modules[name]._parameters}
        packed = {id(tensor) for _, weight in result.packed.values() for tensor in weight.displaced}
        moved |= {name for name, placed in self.placed.items() if id(placed.registry[placed.key]) in packed}
        attach_read_ahead(self.units, self.modules, self.placed, moved, result, self.plan)


def attach_read_ahead(
    units: Iterable[tuple[str, list[str], bool]],
    modules: Mapping[str, nn.Module],
    placed: Mapping[str, PlacedTensor],
    moved: Collection[str],
    result: Dispatched,
    plan: Plan,
) -> None:
    """Page in, ahead of a module's forward, the mapped weights that it computes with on the host.

    Args:
        units: Module names in the order of the model, each with the names of its tensors.
        modules: The model's modules by name.
        placed: Its tensors by name.
        moved: Names of tensors that are copied to another device.
        result: Receives the attachments.
        plan: Gives the resident limit, the read-ahead window and the number of readers.
    """
    files = SourceFiles()
    blocks: dict[str, MappedBlock] = {}
    for name, names, _ in units:
        owners = [_owner(modules, placed[n]) for n in names if n not in moved and _lies_on_disk(placed[n])]
        if owners:
            blocks[name] = MappedBlock(name, owners, files)
    if not blocks:
        return
    reader = ReadAhead(list(blocks.values()), plan.resident_limit, plan.read_ahead_bytes, plan.readers)
    result.readers.append(reader)
    for name, block in blocks.items():
        result.forward_of(name, modules[name]).ahead = (reader, block)


def _makes_weights_before_forward(module: nn.Module) -> bool:
    """Whether hooks make the tensors that a module computes with before its forward is called, as weight norm does: a
    block would be brought in too late."""
    return bool(module._forward_pre_hooks) and any(isinstance(each, torch.Tensor) for each in vars(module).values())


def _lies_on_disk(placed: PlacedTensor) -> bool:
    return placed.offloaded and mapped_region(placed.registry[placed.key]) is not None


def _owner(modules: Mapping[str, nn.Module], placed: PlacedTensor) -> Owner:
    owner = modules[placed.name.rpartition(".")[0]]
    sparse = isinstance(owner, nn.Embedding) or placed.key in expert_names(owner)
    return Owner(placed.registry, placed.key, placed.is_buffer, sparse)


def _spare_bytes(plan: Plan) -> int | None:
    """Return the bytes of the host's budget that the plan leaves free; None without a budget."""
    host = plan.devices.get(HOST)
    return None if host is None or host.free is None else max(0, host.free)
