"""`AcceleratorState`: `PartialState` plus precision, distributed type and plugins of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from bigmodel.errors import TrainError
from bigmodel.train import environment
from bigmodel.train.configuration import TorchDynamoPlugin
from bigmodel.train.precision.mixed import check_precision
from bigmodel.train.state.partial import PartialState
from bigmodel.train.state.ranks import RankOperations
from bigmodel.train.state.shared import SharedState
from bigmodel.train.strategies.base import PARALLELISM_CONFIG, PLUGINS, load
from bigmodel.train.types import DistributedType


@dataclass
class Plugins:
    """The plugins given to the Accelerator.

    `deepspeed` may be one plugin or several by name, of which the first is active.
    """

    deepspeed: Any = None
    fsdp: Any = None
    tensor_parallel: Any = None
    megatron_lm: Any = None
    parallelism_config: Any = None


@dataclass
class Kind:
    """The distributed type of the run, its plugin, and its `ParallelismConfig`."""

    distributed_type: DistributedType
    plugin: Any = None
    parallelism_config: Any = None


def choose_kind(processes: DistributedType, plugins: Plugins) -> Kind:
    """Return the kind of run. `processes` is the type that the number of processes alone implies.

    Raises:
        TrainError: two strategies at once, or one that is not supported (the message names the alternative).
    """
    _refuse_unsupported(plugins)
    parallelism = plugins.parallelism_config
    if parallelism is None and environment.flag(environment.USE_PARALLELISM_CONFIG):
        parallelism = load(PARALLELISM_CONFIG)()
    deepspeed = _given_or_launched(plugins.deepspeed, environment.USE_DEEPSPEED, DistributedType.DEEPSPEED)
    fsdp = _given_or_launched(plugins.fsdp, environment.USE_FSDP, DistributedType.FSDP)
    if plugins.deepspeed is not None and plugins.fsdp is not None:
        raise TrainError("both deepspeed_plugin and fsdp_plugin are given; a run uses one of them")
    if deepspeed is not None and plugins.fsdp is None:
        return Kind(DistributedType.DEEPSPEED, deepspeed, parallelism)
    if fsdp is not None:
        return Kind(DistributedType.FSDP, fsdp, parallelism)
    if getattr(parallelism, "dp_shard_size", 1) > 1:
        return Kind(DistributedType.FSDP, load(PLUGINS[DistributedType.FSDP])(), parallelism)
    if plugins.tensor_parallel is not None or getattr(parallelism, "tp_size", 1) > 1:
        return Kind(DistributedType.TP, plugins.tensor_parallel, parallelism)
    return Kind(processes, None, parallelism)


def _given_or_launched(given: Any, variable: str, kind: DistributedType) -> Any:
    if isinstance(given, Mapping):
        given = dict(given)
    if given is None and environment.flag(variable):
        return load(PLUGINS[kind])()
    return given


def _refuse_unsupported(plugins: Plugins) -> None:
    if plugins.megatron_lm is not None or environment.flag(environment.USE_MEGATRON_LM):
        raise TrainError(
            "Megatron-LM is not supported; use FSDP2 (fsdp_plugin), tensor parallelism (parallelism_config) or both"
        )
    if environment.flag(environment.USE_SAGEMAKER):
        raise TrainError("SageMaker is not supported; start the script with torchrun or `bigmodel launch` instead")
    if environment.text("PJRT_DEVICE", "").upper() == "TPU" or environment.flag("ACCELERATE_USE_TPU"):
        raise TrainError("TPUs are not supported; train on CUDA GPUs, MPS or the CPU")


class AcceleratorState(SharedState, RankOperations):
    """Precision, distributed type and plugins of the run. Every instance shares one state, created by the first
    Accelerator.

    Attributes:
        distributed_type: that of `PartialState`, or FSDP, DEEPSPEED, TP.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        dynamo_plugin: settings of `torch.compile`.
        plugin: the active plugin of the strategy, or None.
        parallelism_config: the `ParallelismConfig`, or None; `device_mesh` is built from it.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    distributed_type: DistributedType
    mixed_precision: str
    dynamo_plugin: TorchDynamoPlugin
    plugin: Any
    parallelism_config: Any
    device_mesh: Any

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        plugins: Plugins | None = None,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            self._check_same(mixed_precision, cpu)
            return
        partial = PartialState(cpu, **kwargs)
        if mixed_precision is None:
            mixed_precision = environment.text(environment.MIXED_PRECISION, "no")
        self.mixed_precision = check_precision(str(mixed_precision).lower(), partial.device)
        kind = choose_kind(partial.distributed_type, plugins or Plugins())
        self.dynamo_plugin = dynamo_plugin or TorchDynamoPlugin()
        self.plugin, self._named_plugins = _active(kind.plugin)
        self.parallelism_config = kind.parallelism_config
        if kind.distributed_type not in (DistributedType.NO, partial.distributed_type):
            partial.need_process_group()
        self.device_mesh = _device_mesh(kind.parallelism_config, partial)
        self._partial = partial
        self.distributed_type = kind.distributed_type
        self._tell_transformers()

    @property
    def initialized(self) -> bool:
        """Whether the state was made completely."""
        return "distributed_type" in self._shared_state

    def _check_same(self, mixed_precision: str | None, cpu: bool) -> None:
        if mixed_precision is not None and str(mixed_precision).lower() != self.mixed_precision:
            raise TrainError(
                f"the Accelerator of this process was made with mixed_precision={self.mixed_precision!r}; "
                f"{mixed_precision!r} cannot be set afterwards. Make the first Accelerator with it"
            )
        if cpu and self._partial.device.type != "cpu":
            raise TrainError(f"the Accelerator of this process was made on {self._partial.device}, not with cpu=True")

    def __getattr__(self, name: str) -> Any:
        partial = self.__dict__.get("_partial")
        if partial is None and not name.startswith("_"):
            raise AttributeError(
                f"`AcceleratorState` object has no attribute `{name}`. This happens if "
                "`AcceleratorState._reset_state()` was called, or none was made yet: make an `Accelerator` first"
            )
        if name.startswith("__") or not hasattr(partial, name):
            raise AttributeError(f"'AcceleratorState' object has no attribute '{name}'")
        return getattr(partial, name)

    @property
    def fsdp_plugin(self) -> Any:
        """The active plugin of sharded data parallelism, or None."""
        return self.plugin if self.distributed_type == DistributedType.FSDP else None

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return PartialState().use_distributed

    # A reset leaves the processes as they are: programs go on asking which of them they are.

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process."""
        return PartialState().is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return PartialState().is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process."""
        return PartialState().is_last_process

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded with `fully_shard`."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def fork_launched(self) -> bool:
        """Whether `notebook_launcher` or `debug_launcher` started this process."""
        return PartialState().fork_launched

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed plugin, or None."""
        return self.plugin if self.distributed_type == DistributedType.DEEPSPEED else None

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed plugin given under `name`."""
        if name not in self._named_plugins:
            raise TrainError(f"no DeepSpeed plugin named {name!r}; there are {sorted(self._named_plugins)}")
        return self._named_plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Make the plugin given under `name` the active one."""
        self.plugin = self.get_deepspeed_plugin(name)
        self._tell_transformers()

    def _tell_transformers(self) -> None:
        """Of several DeepSpeed plugins, have the active one say whether models are sharded while they are loaded."""
        if self._named_plugins:
            for plugin in self._named_plugins.values():
                plugin.mark_selected(False)
            self.plugin.select(_from_accelerator_state=True)
        elif self.deepspeed_plugin is not None:
            self.plugin.mark_selected()

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this."""
        PartialState().wait_for_everyone()

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave a process group; by default that of the run, and with it every other."""
        PartialState().destroy_process_group(group)

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        return f"{self._partial!r}Mixed precision type: {self.mixed_precision}\n"


def _active(plugin: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(plugin, dict):
        return plugin, {}
    if not plugin:
        raise TrainError("deepspeed_plugins is an empty dict; give at least one plugin")
    return next(iter(plugin.values())), plugin


def _device_mesh(parallelism_config: Any, partial: PartialState) -> Any:
    if parallelism_config is None:
        return None
    partial.need_process_group()
    return parallelism_config.build_device_mesh(partial.device.type)
