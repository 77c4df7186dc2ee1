"""The process group: rank and device of this process, joining the group, and leaving it.

A process that raised and does not end, because a thread or a child of its script goes on, is ended: its peers would
wait for it in their next collective until that times out.

Two hazards of gloo's threads are handled here. A forked child (a data-loader worker, `Dataset.map`) has the group's
objects without its threads: if the child's garbage collector destroyed the group, the destructor would wait forever.
At interpreter exit gloo's threads may still hold tensors of finished collectives (see `native_threads`), and PyTorch
does not wait for them while any object, such as a DistributedDataParallel model, refers to the group.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout

from bigmodel.devices import accelerators
from bigmodel.errors import TrainError
from bigmodel.train import environment

from ...devices.native_threads import let_threads_finish


@cache
def keep_garbage_from_forks() -> None:
    """From now on, keep forked children from collecting objects of this process; they still collect their own."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(before=_freeze, after_in_parent=_unfreeze)


_frozen_before = 0


def _freeze() -> None:
    global _frozen_before
    _frozen_before = gc.get_freeze_count()
    gc.freeze()


def _unfreeze() -> None:
    if _frozen_before == 0:  # else the program froze objects itself, and they cannot be told apart
        gc.unfreeze()


def leave_at_exit() -> None:
    """At interpreter exit, leave the process group if this process is still in one, and wait for its threads.

    Must be called once the group exists: exit functions run in reverse order of registration.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


@cache
def end_after_errors(seconds: float = 60.0) -> None:
    """From now on, end this process `seconds` after an error that nothing caught, if threads or children still keep it.

    Its connections are closed with it, which its peers then notice, as a launcher notices its exit code. One that runs
    exit functions is not ended: they may save what there is. Nor is one that has left the group, or an interactive one.
    """
    before, process = sys.excepthook, os.getpid()

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if os.getpid() != process or not dist.is_initialized() or sys.flags.interactive or hasattr(sys, "ps1"):
            return
        threading.Thread(target=_end_if_left, args=(seconds,), name="bigmodel-end-after-errors", daemon=True).start()

    sys.excepthook = report


def _end_if_left(seconds: float) -> None:
    time.sleep(seconds)
    first, own = threading.main_thread(), threading.current_thread()
    left = [each.name for each in threading.enumerate() if not each.daemon and each not in (first, own)]
    left += [child.name for child in multiprocessing.active_children() if not child.daemon]
    if not left:
        return
    try:
        print(
            f"bigmodel: this process raised {seconds:g} s ago and has not ended, kept by {', '.join(left)}: it is "
            "ended, as others wait for it",
            file=sys.stderr,
            flush=True,
        )
        for child in multiprocessing.active_children():
            child.terminate()  # nobody else would end it
        sys.stdout.flush()
    finally:
        os._exit(1)


def finish_at_exit() -> None:
    """At interpreter exit, wait for the threads of a process group that other code created."""
    atexit.unregister(let_gloo_finish)
    atexit.register(let_gloo_finish)


def _leave() -> None:
    """Destroy the process group, unless an error ends the process: then other ranks may block the destruction."""
    if dist.is_initialized() and getattr(sys, "last_type", None) is None:
        gc.collect()
        dist.destroy_process_group()
    let_gloo_finish()


def let_gloo_finish() -> None:
    """Wait until gloo's threads hold no tensor."""
    let_threads_finish("pt_gloo_runloop")


_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_WORLD_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


@dataclass(frozen=True)
class ProcessNumbers:
    """A process's rank in the run and on its machine, and the numbers of processes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def launched_numbers() -> ProcessNumbers:
    """Return the ranks set by torchrun or mpirun; without a launcher, those of a single process."""
    numbers = ProcessNumbers(_first(_RANK, 0), _first(_WORLD_SIZE, 1), 0)
    return ProcessNumbers(numbers.rank, numbers.world_size, _first(_LOCAL_RANK, numbers.rank))


def _first(names: tuple[str, ...], default: int) -> int:
    return next((environment.integer(name, default) for name in names if os.environ.get(name)), default)


def choose_device(cpu: bool, local_rank: int) -> torch.device:
    """Return the device of the process with rank `local_rank` on its machine. It has an index if it is an accelerator.

    Raises:
        TrainError: there are accelerators, but fewer than processes.
    """
    forced = os.environ.get(environment.TORCH_DEVICE)
    if forced:
        device = torch.device(forced)
        # Without an index every process of this machine would take its first accelerator.
        return (
            torch.device(device.type, local_rank) if device.type in ("cuda", "xpu") and device.index is None else device
        )
    present = [] if cpu else accelerators()
    if not present:
        return torch.device("cpu")
    if local_rank >= len(present):
        raise TrainError(
            f"process {local_rank} of this machine has no accelerator of its own: there are {len(present)} "
            f"({', '.join(present)}); start at most {len(present)} processes here, or train on the CPU (cpu=True)"
        )
    return torch.device(present[local_rank])


def make_process_group(
    device: torch.device,
    numbers: ProcessNumbers,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    **kwargs: Any,
) -> None:
    """Join the run's process group. It always has a CPU backend, so that CPU tensors can be gathered too."""
    if device.type not in _BACKENDS and backend is None:
        raise TrainError(f"several processes cannot train on {device.type}; use one process, or the CPU (cpu=True)")
    if init_method is None and numbers.world_size > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise TrainError(f"{' and '.join(missing)} must be set for {numbers.world_size} processes to connect")
    if device.type in ("cuda", "xpu"):
        torch.get_device_module(device.type).set_device(device)
    if backend == "nccl":
        backend = _BACKENDS["cuda"] if device.type == "cuda" else None
    if numbers.world_size == 1 and init_method is None:
        kwargs["store"] = HashStore()  # a group of one needs no port
    elif init_method is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        kwargs["store"] = _store_of_this_attempt(timeout)
    dist.init_process_group(
        backend or _BACKENDS[device.type],
        init_method=init_method,
        timeout=timeout,
        rank=numbers.rank,
        world_size=numbers.world_size,
        **kwargs,
    )
    leave_at_exit()
    keep_garbage_from_forks()
    if numbers.world_size > 1:
        end_after_errors()


def _store_of_this_attempt(timeout: timedelta | None) -> PrefixStore:
    """Return the launcher's store under a key prefix of this attempt.

    The launcher's store outlives its processes: without the prefix, restarted processes would read the addresses of
    dead ones.
    """
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        environment.integer("MASTER_PORT", 0),
        is_master=False,
        timeout=timeout or default_pg_timeout,
    )
    return PrefixStore(f"attempt_{environment.integer('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def group_backend(device: torch.device) -> str:
    """Return the name of the backend by which tensors on `device` are exchanged, as "nccl" or "gloo"."""
    found = str(dist.get_backend())
    by_device = dict(each.split(":") for each in found.split(",")) if ":" in found else {}
    return by_device.get(device.type, found)


def change_timeout(timeout: timedelta) -> None:
    """Change the timeout of the existing process group."""
    dist.distributed_c10d._set_pg_timeout(timeout)
