"""Starting a function, not a script, on several processes: from a notebook or a test."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import LaunchError
from ..limits import RENDEZVOUS_PORT
from ..train.environment import changed_environment
from .environment import launch_environment
from .job import launcher_log, log_folder
from .processes import check_port
from .settings import MIXED_PRECISIONS, LaunchConfig
from .start_method import start_method


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = str(RENDEZVOUS_PORT),
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    cpu: bool | None = None,
) -> None:
    """Run `function(*args)` in `num_processes` processes, each with its rank.

    They are forked from this process, so `function` may be defined in a notebook. Where a fork could not train,
    because CUDA was used here or autograd's device threads have started, they are fresh interpreters that import
    `function`.

    Args:
        num_processes: processes on this machine. Default: one for each GPU, or one without a GPU.
        cpu: train on the CPU over gloo. Default: only when the machine has no GPU.
        use_port: where the processes meet; 0 on a single machine takes a free one.
        master_addr: address of machine 0.
        node_rank: the number of this machine, from 0.
        num_nodes: machines that take part.
        rdzv_backend: rendezvous of several machines: static or c10d.
        rdzv_endpoint: address of the rendezvous; by default, `master_addr` and `use_port`.
        rdzv_conf: further settings of the rendezvous.
        rdzv_id: name of the job at the rendezvous.
        max_restarts: times that all processes are restarted after one fails.
        monitor_interval: seconds between checks of the processes.
        log_line_prefix_template: what `torch.distributed.run` puts before each line it passes on.

    Raises:
        LaunchError: processes can neither be forked nor import `function`, the port is busy, there are more
            processes than GPUs, or a process failed (also torch's
            ChildFailedError then; the message holds its traceback).
    """
    count, on_cpu = _processes_here(num_processes, cpu)
    variables = _variables(count, num_nodes, on_cpu, str(mixed_precision).lower())
    if count * num_nodes == 1:
        with changed_environment(variables):
            function(*args)
        return
    method = start_method(function, args, on_cpu)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig

    with log_folder(None) as logs, changed_environment(variables):
        config = ElasticConfig(
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex if rdzv_id == "none" and rdzv_backend != "static" else rdzv_id,
            role="default",
            rdzv_endpoint=rdzv_endpoint or _endpoint(master_addr, int(use_port), node_rank, num_nodes),
            rdzv_backend=rdzv_backend,
            rdzv_configs={"rank": node_rank, **(rdzv_conf or {})},
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            log_line_prefix_template=log_line_prefix_template,
            start_method=method,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        _run(config, function, args)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in `num_processes` CPU processes over gloo: tests multi-process code on any machine.

    Raises:
        LaunchError: a process failed; the message holds its traceback.
    """
    notebook_launcher(function, args, num_processes=num_processes, use_port=0, cpu=True)


def _processes_here(num_processes: int | None, cpu: bool | None) -> tuple[int, bool]:
    import torch

    gpus = torch.cuda.device_count()
    on_cpu = gpus == 0 if cpu is None else cpu
    count = num_processes or (1 if on_cpu else gpus)
    if not on_cpu and count > gpus:
        raise LaunchError(f"num_processes {count} needs {count} GPUs, but this machine has {gpus}; or pass cpu=True.")
    return count, on_cpu


def _variables(count: int, num_nodes: int, on_cpu: bool, mixed_precision: str) -> dict[str, str]:
    if mixed_precision not in MIXED_PRECISIONS:
        raise LaunchError(f"mixed_precision is {mixed_precision!r}; one of: {', '.join(MIXED_PRECISIONS)}.")
    settings = LaunchConfig(mixed_precision=mixed_precision, num_processes=count * num_nodes)
    return {**launch_environment(settings, count, on_cpu), "FORK_LAUNCHED": "1"}  # read by other libraries


def _endpoint(address: str, port: int, node_rank: int, num_nodes: int) -> str:
    if num_nodes == 1 and port == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
    elif node_rank == 0:
        check_port(address, port)
    return f"{address}:{port}"


def _run(config: Any, function: Callable[..., Any], args: Sequence[Any]) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with launcher_log(show=False):
        try:
            elastic_launch(config, _ProcessMain(function, forked=config.start_method == "fork"))(*args)
        except ChildFailedError as failed:
            from .failure import ProcessFailedError

            raise ProcessFailedError(failed) from None


class _ProcessMain:
    """The picklable entry point of a new process, which runs `function`."""

    def __init__(self, function: Callable[..., Any], forked: bool) -> None:
        self.function = function
        self.forked = forked
        # torch's agent names its processes after this.
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", "function")

    def __call__(self, *args: Any) -> Any:
        from torch.distributed.elastic.multiprocessing.errors import record

        if self.forked:
            _forget_parent()
        return record(self.function)(*args)


def _forget_parent() -> None:
    """Reset the state inherited by a forked process that is invalid in it."""
    import torch

    from bigmodel.train.accelerator_state import AcceleratorState
    from bigmodel.train.state.gradient import GradientState

    # The inherited states describe the parent, which is not a rank.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # The inherited OpenMP pool has no threads; with a single thread, nothing waits for them.
    torch.set_num_threads(1)
