"""Arguments of dispatching besides the device map: those that a plan decides, and options without effect on memory or
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ...arguments import check_choice, check_flags, optional_whole_number
from ...devices import HOST, DeviceLike, device_key, format_size, get_max_memory, parse_size
from ...errors import PlanError
from ...limits import DEFAULT_SLOTS
from ...plan import OFFLOADS, Plan
from ...profile.model.quantized import OFFLOAD_DTYPES
from ...profile.model.tensors import torch_dtype
from ...quantized.host_kernels import HOST_KERNELS


@dataclass(frozen=True)
class Options:
    """Options of dispatching that no plan decides.

    Attributes:
        skip_keys: Keyword arguments that are never moved between devices.
        no_split_module_classes: Classes whose modules are never split; None detects them.
        force_hooks: Attach to the root module even if no attachment is needed.
        offload_folder: Folder for quantised weights that are mapped to disk.
        align_memory: Whether weights that the host computes with are copied where their file misaligns them. The models
            that transformers loads compute with them as the file has them.
        observer: Called with the model each time it has been dispatched; returns what is called when that is undone.
    """

    skip_keys: Collection[str] | str | None = None
    no_split_module_classes: Collection[str] | None = None
    force_hooks: bool = False
    offload_folder: Path | None = None
    align_memory: bool = True
    observer: Callable[[nn.Module], Callable[[], None]] | None = None


@dataclass(frozen=True)
class PlanArguments:
    """Arguments of dispatching that a plan decides. None leaves the decision to the plan, or to the default.

    Given together with a plan, each must agree with it (`check`); otherwise a plan is made with them.

    Attributes:
        main_device: Execution device of offloaded modules.
        max_memory: Budgets by device key, in bytes.
        no_split_module_classes: Classes that are placed and streamed as a whole.
        offload: One of `OFFLOADS`.
        offload_buffers: Whether buffers of offloaded modules are stored with their weights and streamed.
        offload_dtype: Integer dtype to which streamed weights are quantised for the link.
        host_kernels: One of `HOST_KERNELS`.
        expert_cache: Bytes of each device for experts that are fetched one by one.
        pinned_memory: Bytes of host memory that may be pinned.
        dtype: Dtype of floating-point weights on their execution device.
        slots: Streamed modules that may be on the main device at once.
        micro_batch_size: Rows in which a forward of more rows is computed.
    """

    main_device: DeviceLike | None = None
    max_memory: Mapping[int | str, int] | None = None
    no_split_module_classes: Collection[str] | None = None
    offload: str | None = None
    offload_buffers: bool | None = None
    offload_dtype: str | None = None
    host_kernels: str | None = None
    expert_cache: int | None = None
    pinned_memory: int | None = None
    dtype: torch.dtype | None = None
    slots: int = DEFAULT_SLOTS
    micro_batch_size: int | None = None

    @classmethod
    def read(
        cls,
        *,
        main_device: DeviceLike | None = None,
        max_memory: Mapping[DeviceLike, int | str] | None = None,
        no_split_module_classes: Collection[str] | None = None,
        offload: str | None = None,
        offload_buffers: bool | None = None,
        offload_dtype: str | None = None,
        host_kernels: str | None = None,
        expert_cache: int | str | None = None,
        pinned_memory: int | str | None = None,
        dtype: torch.dtype | None = None,
        micro_batch_size: int | None = None,
    ) -> PlanArguments:
        """Return the arguments, parsed: sizes may be ints or text, budgets may use any device names.

        Raises:
            SizeError: A size cannot be read.
            DeviceError: A key of `max_memory` is not a device.
            PlanError: Another argument is invalid.
        """
        if offload is not None and offload not in OFFLOADS:
            raise PlanError(f"offload is {offload!r}; use one of {', '.join(OFFLOADS)}")
        if offload_buffers is not None:
            check_flags(offload_buffers=offload_buffers)
        check_choice("offload_dtype", offload_dtype, (*OFFLOAD_DTYPES, None))
        check_choice("host_kernels", host_kernels, (*HOST_KERNELS, None))
        return cls(
            main_device=main_device,
            max_memory=None if max_memory is None else get_max_memory(max_memory),
            no_split_module_classes=no_split_module_classes,
            offload=offload,
            offload_buffers=offload_buffers,
            offload_dtype=offload_dtype,
            host_kernels=host_kernels,
            expert_cache=None if expert_cache is None else parse_size(expert_cache),
            pinned_memory=None if pinned_memory is None else parse_size(pinned_memory),
            dtype=dtype,
            micro_batch_size=optional_whole_number("micro_batch_size", micro_batch_size, least=1),
        )

    @classmethod
    def of(cls, plan: Plan) -> PlanArguments:
        """Return the arguments that give another device map the settings of `plan`."""
        budgets = {key: device.budget for key, device in plan.devices.items() if device.budget is not None}
        return cls(
            main_device=plan.main_device,
            max_memory=budgets or None,
            offload_buffers=plan.offload_buffers,
            offload_dtype=plan.offload_dtype,
            host_kernels=plan.host_kernels,
            expert_cache=max(plan.expert_cache.values(), default=None),
            pinned_memory=plan.pinned_memory,
            dtype=dtype_of(plan),
            slots=plan.slots or DEFAULT_SLOTS,
            micro_batch_size=plan.micro_batch_size,
        )

    def check(self, plan: Plan) -> None:
        """Raise PlanError for the first argument that contradicts `plan`, naming both values."""
        for name, given, planned in self._contradictions(plan):
            raise PlanError(
                f"{name} is {given}, but the plan has {planned}: leave the argument out, or make the plan with it"
            )

    def _contradictions(self, plan: Plan) -> Iterator[tuple[str, object, object]]:
        if self.main_device is not None and device_key(self.main_device) != plan.main_device:
            yield "main_device", repr(device_key(self.main_device)), repr(plan.main_device)
        for key, size in (self.max_memory or {}).items():
            budget = plan.devices[key].budget if key in plan.devices else None
            if size != budget:
                yield f"max_memory[{key!r}]", format_size(size), _size(budget)
        if self.offload not in (None, "auto", offload_of(plan)) and offload_of(plan) is not None:
            yield "offload", repr(self.offload), f"parts with offload={offload_of(plan)!r}"
        for name in ("offload_buffers", "offload_dtype", "host_kernels", "micro_batch_size"):
            given, planned = getattr(self, name), getattr(plan, name)
            if given not in (None, planned):
                yield name, repr(given), repr(planned)
        for key, size in plan.expert_cache.items():
            if self.expert_cache not in (None, size):
                yield "expert_cache", _size(self.expert_cache), f"{_size(size)} on device {key!r}"
        if self.pinned_memory not in (None, plan.pinned_memory):
            yield "pinned_memory", _size(self.pinned_memory), _size(plan.pinned_memory)
        if self.dtype is not None and dtype_of(plan) not in (None, self.dtype):
            yield "dtype", self.dtype, dtype_of(plan)


LOOKUP = "Embedding"
"""Class name of lookup tables, which always run on their storage device."""


def offload_of(plan: Plan) -> str | None:
    """Return how a plan offloads: "stream", "compute", or "auto" for both; None if it offloads nothing."""
    if plan.main_device == HOST:
        return None
    if plan.computed_below or plan.expert_split is not None:
        return "auto"
    computed = any(part.runs_on == HOST and part.kind != LOOKUP for part in plan.parts)
    if computed:
        return "auto" if plan.streamed else "compute"
    return "stream" if plan.streamed else None


def dtype_of(plan: Plan) -> torch.dtype | None:
    """Return the dtype to which a plan casts weights on their execution device; None if they are not cast."""
    return None if plan.dtype is None else torch_dtype(plan.dtype)


def _size(nbytes: int | None) -> str:
    return "none" if nbytes is None else f"{format_size(nbytes)} ({nbytes} bytes)"
