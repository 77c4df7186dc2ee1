"""A function made ready to be started in several processes, and the variables that lists of paths are in."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..train.types import DistributedType

_RANKS_FROM_INDEX = (
    *(DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_MLU, DistributedType.MULTI_MUSA),
    *(DistributedType.MULTI_NPU, DistributedType.MULTI_XPU, DistributedType.MULTI_NEURON),
)


class PrepareForLaunch:
    """Entry point for `torch.multiprocessing.start_processes`: a function that learns its rank from its index.

    Args:
        launcher: The function; called without the index.
        distributed_type: Kinds of several processes read ``NPROC`` and ``NODE_RANK`` and set the ranks.
        debug: Meet over gloo in the file ``ACCELERATE_DEBUG_RDV_FILE``, ``WORLD_SIZE`` processes in all.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: DistributedType | str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        if self.debug:
            _meet_in_file(index)
        elif self.distributed_type in _RANKS_FROM_INDEX:
            os.environ["LOCAL_RANK"] = str(index)
            here, machine = int(os.environ.get("NPROC", "1")), int(os.environ.get("NODE_RANK", "0"))
            os.environ["RANK"] = str(here * machine + index)
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)


def env_var_path_add(env_var_name: str, path_to_add: str | os.PathLike[str]) -> str:
    """Return the value of a variable that lists paths, with one more at its end; the variable stays as it is."""
    paths = [path for path in os.environ.get(env_var_name, "").split(":") if path]
    return ":".join([*paths, str(path_to_add)])


def _meet_in_file(index: int) -> None:
    import torch.distributed as dist

    size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["ACCELERATE_DEBUG_RDV_FILE"], size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=index, store=store, world_size=size)
