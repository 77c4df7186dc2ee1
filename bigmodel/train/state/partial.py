"""PartialState: rank and device of this process. The state is shared by the whole process and created on first use."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from bigmodel.devices import torch_device
from bigmodel.errors import TrainError
from bigmodel.train import environment
from bigmodel.train.state.process_group import (
    ProcessNumbers,
    change_timeout,
    choose_device,
    finish_at_exit,
    group_backend,
    keep_garbage_from_forks,
    launched_numbers,
    let_gloo_finish,
    make_process_group,
)
from bigmodel.train.state.ranks import RankOperations
from bigmodel.train.state.shared import SharedState
from bigmodel.train.types import DistributedType

_ATTRIBUTES = (
    "backend",
    "debug",
    "device",
    "distributed_type",
    "local_process_index",
    "num_processes",
    "process_index",
)


class PartialState(SharedState, RankOperations):
    """Ranks and device of this process. Every instance shares one state.

    Args:
        cpu: train on the CPU even if there is an accelerator.
        kwargs: arguments of `torch.distributed.init_process_group` (`backend`, `init_method`, `timeout`).

    Attributes:
        device: the `torch.device` of this process.
        num_processes, process_index, local_process_index: number of processes, rank, and rank on this machine.
        distributed_type: NO, MULTI_CPU or MULTI_GPU.
        backend: the process group's backend, or None without one.
        debug: whether collectives first check that shapes agree (ACCELERATE_DEBUG_MODE).
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    debug: bool
    _cpu: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            self._take_timeout(kwargs.get("timeout"))
            return
        self._start(cpu or environment.flag(environment.USE_CPU), kwargs)

    def _start(self, cpu: bool, kwargs: dict[str, Any]) -> None:
        numbers = launched_numbers()
        if dist.is_available() and dist.is_initialized():
            numbers = ProcessNumbers(dist.get_rank(), dist.get_world_size(), numbers.local_rank)
        device = choose_device(cpu, numbers.local_rank)
        if dist.is_available() and dist.is_initialized():
            finish_at_exit()
            keep_garbage_from_forks()
        elif numbers.world_size > 1:
            make_process_group(device, numbers, **kwargs)
        self.device, self._cpu = device, cpu
        self.debug = environment.flag(environment.DEBUG_MODE)
        self.backend = group_backend(device) if dist.is_initialized() else None
        self.process_index, self.num_processes = numbers.rank, numbers.world_size
        self.local_process_index = numbers.local_rank
        several = DistributedType.MULTI_CPU if device.type == "cpu" else DistributedType.MULTI_GPU
        self.distributed_type = several if numbers.world_size > 1 else DistributedType.NO

    def _picklable_state(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "data_group"}

    def _take_timeout(self, timeout: timedelta | None) -> None:
        if timeout is not None and dist.is_initialized():
            change_timeout(timeout)

    @property
    def initialized(self) -> bool:
        """Whether the state was created."""
        return bool(self._shared_state)

    @property
    def fork_launched(self) -> bool:
        """Whether `notebook_launcher` or `debug_launcher` started this process."""
        return environment.flag("FORK_LAUNCHED", False)

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def default_device(self) -> torch.device:
        """The device of a single process: the first accelerator, else the CPU."""
        return choose_device(self._cpu, 0)

    def need_process_group(self) -> None:
        """Create a process group also for a single process, for strategies that need one."""
        if not dist.is_initialized():
            make_process_group(self.device, ProcessNumbers())
            self.backend = group_backend(self.device)

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this."""
        if not self.use_distributed:
            return
        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()

    def set_device(self, device: torch.device | str | int) -> None:
        """Use another device. Raises TrainError in a run of several processes."""
        if self.use_distributed:
            raise TrainError(
                "the rank of a process in a distributed run determines its device, which cannot be changed"
            )
        self.device = torch_device(device)

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave a process group; by default that of the run, and with it every other.

        A DistributedDataParallel model keeps its group alive. The model's destructor joins gloo's threads while holding
        the interpreter's lock, so this method first waits until they hold no tensor: releasing one needs that lock.
        """
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group(group)
            let_gloo_finish()

    @classmethod
    def _reset_state(cls) -> None:
        """Reset the state, so that the next instance reads the environment again."""
        cls._shared_state.clear()

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            raise AttributeError(
                f"`PartialState` object has no attribute `{name}`. This happens if `PartialState._reset_state()` was "
                "called and no `Accelerator` or `PartialState` has been made since"
            )
        raise AttributeError(f"'PartialState' object has no attribute '{name}'")

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}  Backend: {self.backend}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )
