"""The multiprocessing start method of a function: fork where that works, else spawn.

A forked process has its parent's memory, including definitions typed into a notebook, but only one of its threads.
Once CUDA or autograd's device threads have started in the parent, a forked process cannot use them. A spawned process
works for every function that it can import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..errors import LaunchError


def start_method(function: Callable[..., Any], args: Sequence[Any], cpu: bool) -> str:
    """Return "fork", or "spawn" where a fork could not train but `function(*args)` can be sent to fresh processes.

    Args:
        cpu: The processes will train on the CPU.

    Raises:
        LaunchError: neither can work.
    """
    reason = why_not_fork(cpu)
    if reason is None:
        return "fork"
    obstacle = _why_not_spawn(function, args)
    if obstacle is None:
        return "spawn"
    raise LaunchError(
        f"{reason} Nor can the function be sent to fresh processes: {obstacle}. Restart the notebook and use "
        "accelerators and backward passes only inside the launched function; or put the function into a module and "
        "import it; or put it into a script and use `bigmodel launch`."
    )


def why_not_fork(cpu: bool) -> str | None:
    """Return the reason why a process forked from this one could not train, as a sentence; None when it could."""
    import torch

    if not hasattr(os, "fork"):
        return "This system cannot fork processes."
    if not cpu and torch.cuda.is_initialized():
        return "CUDA was already used in this process, and a forked process could not use it."
    if not _works_in_fork(lambda: torch.ones((), requires_grad=True).backward()):
        return (
            "A backward pass already ran in this process and started autograd's device threads, which a forked "
            "process does not have."
        )
    # Optimizers ask CUDA also for weights of the host.
    if torch.cuda.is_available() and not _works_in_fork(torch.cuda.is_current_stream_capturing):
        return "CUDA's driver was already asked in this process, by an import if not by you; a fork could not use it."
    return None


def _works_in_fork(attempt: Callable[[], object]) -> bool:
    """Whether `attempt` ends without an error in a fork: PyTorch and CUDA detect what is lost only there."""
    process = os.fork()
    if process == 0:
        try:
            attempt()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(process, 0)[1] == 0


def _why_not_spawn(function: Callable[..., Any], args: Sequence[Any]) -> str | None:
    name = getattr(function, "__qualname__", repr(function))
    main = sys.modules["__main__"]
    if getattr(function, "__module__", None) == "__main__" and getattr(main, "__file__", None) is None:
        return f"{name} is defined in the notebook, not in a module"
    try:
        ForkingPickler.dumps((function, tuple(args)))
    except Exception as error:
        return f"{name} and its arguments cannot be pickled ({error})"
    return None
