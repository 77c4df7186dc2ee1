"""`FullyShardedDataParallelPlugin`: settings of sharding and its precision."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from bigmodel.errors import TrainError
from bigmodel.train import environment
from bigmodel.train.strategies.sharded.blocks import class_names

_PREFIX = "FSDP_"
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_STATE_DICT_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
# What FSDP1's strategies mean for FSDP2: free parameters after forward or keep them until backward.
_RESHARD = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}

_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}


@dataclass
class FullyShardedDataParallelPlugin:
    """Settings of fully sharded data parallelism, which is FSDP2 (`torch.distributed.fsdp.fully_shard`) always.

    Fields left at None are read from the FSDP_* variables that `bigmodel launch` sets. Fields that only FSDP1 had are
    accepted so that existing scripts work; what they ask for is what FSDP2 does, or has no counterpart.

    Attributes:
        fsdp_version: 1 or 2; both run FSDP2.
        reshard_after_forward: True frees gathered parameters after forward (less memory), False keeps them until
            backward (less traffic), a number reshards to that many ranks. FSDP1's strategy names are understood.
        mixed_precision_policy: a `MixedPrecisionPolicy`, a dict of its arguments, or "bf16" / "fp16".
        auto_wrap_policy: "transformer_based_wrap", "size_based_wrap", "no_wrap" or a function of a module that says
            whether it is a unit of its own. None: the blocks the model names, else its repeated blocks.
        transformer_cls_names_to_wrap: class names of the blocks for transformer_based_wrap.
        min_num_params: number of parameters that makes a unit with size_based_wrap.
        cpu_offload: keep shards, gradients and optimizer state in RAM; True, False or a `CPUOffloadPolicy`.
        ignored_modules: modules, or a regular expression of their names, that stay whole on every rank.
        state_dict_type: "SHARDED_STATE_DICT" (each rank writes its shards) or "FULL_STATE_DICT" (one file).
        activation_checkpointing: recompute each unit's activations in backward.
        activation_checkpointing_offload: keep what is saved for backward in RAM.
        hybrid: each machine holds one sharded copy (FSDP1's HYBRID_SHARD).
        cpu_ram_efficient_loading: ranks other than 0 may build the model on the meta device.

    Raises:
        TrainError: a value that is not understood.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable[..., Any] | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None
    hybrid: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.fsdp_version is None:
            self.fsdp_version = environment.integer(_PREFIX + "VERSION", 2)
        if self.fsdp_version not in (1, 2):
            raise TrainError(f"fsdp_version is {self.fsdp_version}; it must be 1 or 2 (both run FSDP2)")
        strategy = self._strategy()
        self.hybrid = isinstance(strategy, str) and "HYBRID" in strategy
        self.reshard_after_forward = _reshard(strategy)
        self._read_flags()
        self._read_wrapping()
        self.set_state_dict_type(self.state_dict_type)
        if self.ignored_modules is None:
            self.ignored_modules = os.environ.get(_PREFIX + "IGNORED_MODULES") or None
        self.mixed_precision_policy = _policy(self.mixed_precision_policy)

    @property
    def offload_to_cpu(self) -> bool:
        """Whether shards are stored in RAM."""
        given = self.cpu_offload
        if isinstance(given, OffloadPolicy):
            return isinstance(given, CPUOffloadPolicy)
        return bool(getattr(given, "offload_params", given))

    def set_cpu_offload(self) -> None:
        """Turn `cpu_offload` into the policy of FSDP2 that it means: True, False, or FSDP1's `CPUOffload`."""
        self.cpu_offload = CPUOffloadPolicy() if self.offload_to_cpu else OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Check that `cpu_offload` is a policy of FSDP2, as `set_cpu_offload` makes it.

        Raises:
            TrainError: it is not.
        """
        if not isinstance(self.cpu_offload, OffloadPolicy):
            raise TrainError(
                f"cpu_offload is {self.cpu_offload!r}, no torch.distributed.fsdp.OffloadPolicy; call set_cpu_offload"
            )

    def validate_mixed_precision_policy(self) -> None:
        """Check that `mixed_precision_policy` is a policy of FSDP2, as `set_mixed_precision` makes it.

        Raises:
            TrainError: it is not.
        """
        if not isinstance(self.mixed_precision_policy, MixedPrecisionPolicy):
            raise TrainError(
                f"mixed_precision_policy is {self.mixed_precision_policy!r}, no "
                "torch.distributed.fsdp.MixedPrecisionPolicy; call set_mixed_precision"
            )

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose how checkpoints are written.

        Raises:
            TrainError: neither FULL_STATE_DICT nor SHARDED_STATE_DICT.
        """
        chosen = state_dict_type or os.environ.get(_PREFIX + "STATE_DICT_TYPE") or _STATE_DICT_TYPES[1]
        name = _name(chosen)
        if name == "LOCAL_STATE_DICT":
            name = "SHARDED_STATE_DICT"
        if name not in _STATE_DICT_TYPES:
            raise TrainError(f"state_dict_type is {chosen!r}; one of: {', '.join(_STATE_DICT_TYPES)}")
        self.state_dict_type = name

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Decide for `model` what `auto_wrap_policy` leaves open, as preparing it does; scripts may ask for it before.

        With transformer_based_wrap the names of the blocks' classes are those given, else the blocks of the model. With
        size_based_wrap and no `min_num_params` there is nothing to go by, and the policy becomes None.

        Raises:
            TrainError: The model has no module of a class that is named, or its blocks are unknown.
        """
        if self.auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
            self.transformer_cls_names_to_wrap = sorted(
                class_names(model, self.transformer_cls_names_to_wrap or (), must=True)
            )
        elif self.auto_wrap_policy == "SIZE_BASED_WRAP" and not self.min_num_params:
            self.auto_wrap_policy = None

    def set_mixed_precision(self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the policy that corresponds to the Accelerator's `mixed_precision`, unless one was given.

        Parameters are gathered and computed with in the 16-bit type; gradients are reduced in float32.

        Args:
            mixed_precision: "fp16", "bf16" or "fp8"; others set nothing.
            buffer_autocast: must be False: FSDP2 leaves the dtype of buffers as it is.
            override: replace a policy that was given.

        Raises:
            TrainError: `buffer_autocast` is True.
        """
        if buffer_autocast:
            raise TrainError("buffer_autocast is True, but FSDP2 leaves buffers alone; cast them before preparing")
        dtype = _DTYPES.get(mixed_precision)
        if dtype is not None and (override or self.mixed_precision_policy is None):
            self.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32
            )

    def _strategy(self) -> bool | int | str:
        """Return the setting: whether to reshard, a number of ranks, or the upper-case name of an FSDP1 strategy."""
        if self.reshard_after_forward is not None:
            return _as_reshard(self.reshard_after_forward)
        if self.sharding_strategy is not None:
            return _as_strategy(self.sharding_strategy)
        reshard = os.environ.get(_PREFIX + "RESHARD_AFTER_FORWARD")
        if reshard:
            return _as_reshard(reshard)
        return _as_strategy(os.environ.get(_PREFIX + "SHARDING_STRATEGY") or True)

    def _read_flags(self) -> None:
        if self.cpu_offload is None:
            self.cpu_offload = environment.flag(_PREFIX + "OFFLOAD_PARAMS")
        names = ("use_orig_params", "sync_module_states", "forward_prefetch", "cpu_ram_efficient_loading")
        for name in (*names, "activation_checkpointing", "activation_checkpointing_offload"):
            if getattr(self, name) is None:
                setattr(self, name, environment.flag(_PREFIX + name.upper()))
        if self.cpu_ram_efficient_loading:
            # transformers reads it in from_pretrained: only rank 0 then holds real weights.
            os.environ[_PREFIX + "CPU_RAM_EFFICIENT_LOADING"] = "true"

    def _read_wrapping(self) -> None:
        if self.auto_wrap_policy is None:
            self.auto_wrap_policy = os.environ.get(_PREFIX + "AUTO_WRAP_POLICY") or None
        if isinstance(self.auto_wrap_policy, str):
            name = self.auto_wrap_policy.upper()
            if name not in _POLICIES:
                allowed = ", ".join(_POLICIES).lower()
                raise TrainError(f"auto_wrap_policy is {self.auto_wrap_policy!r}; one of: {allowed}, or a function")
            self.auto_wrap_policy = name
        if self.transformer_cls_names_to_wrap is None:
            names = os.environ.get(_PREFIX + "TRANSFORMER_CLS_TO_WRAP", "")
            self.transformer_cls_names_to_wrap = [n.strip() for n in names.split(",") if n.strip()] or None
        elif isinstance(self.transformer_cls_names_to_wrap, str):
            self.transformer_cls_names_to_wrap = [self.transformer_cls_names_to_wrap]
        if self.min_num_params is None:
            self.min_num_params = environment.integer(_PREFIX + "MIN_NUM_PARAMS", 0)


def _name(value: Any) -> str:
    """Return the upper-case name of an enumeration's member or of a text."""
    return str(getattr(value, "name", value)).upper().lstrip("_")


def _as_reshard(value: Any) -> bool | int | str:
    """Read `reshard_after_forward`. A number above 4 counts ranks; as text, 1 to 4 are FSDP1's strategies, as files of
    that version give them there."""
    if isinstance(value, int):
        return value
    name = _name(value)
    return int(name) if name.isdigit() and int(name) > len(_NUMBERED) else _as_strategy(name)


def _as_strategy(value: Any) -> bool | str:
    """Read `sharding_strategy`, which FSDP1 numbered from 1."""
    name = _name(value)
    if name in ("TRUE", "FALSE"):
        return name == "TRUE"
    return _NUMBERED.get(name, name)


def _reshard(strategy: bool | int | str) -> bool | int:
    if not isinstance(strategy, str):
        return strategy
    if strategy == "NO_SHARD":
        raise TrainError("the FSDP strategy NO_SHARD is plain data parallelism; leave FSDP out (MULTI_GPU)")
    if strategy not in _RESHARD:
        raise TrainError(
            f"reshard_after_forward is {strategy!r}; it must be true, false, a number or an FSDP1 strategy"
        )
    return _RESHARD[strategy]


def _policy(value: Any) -> MixedPrecisionPolicy | None:
    if value is None or isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, str):
        if value not in _DTYPES:
            raise TrainError(f"mixed_precision_policy is {value!r}; one of: {', '.join(_DTYPES)}, or a policy")
        return MixedPrecisionPolicy(param_dtype=_DTYPES[value], reduce_dtype=torch.float32)
    given = value if isinstance(value, dict) else vars(value)
    known = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    return MixedPrecisionPolicy(**{name: given[name] for name in known if name in given})
