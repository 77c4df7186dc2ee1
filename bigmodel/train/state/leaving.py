"""Leaving the process group at the end of Python, before the threads of gloo can be caught in it.

They hold tensors of collectives that have returned (see `native_threads`). PyTorch does not wait for them as long as
anything refers to the group, as a model in DistributedDataParallel does.
"""

from __future__ import annotations

import atexit
import gc
import sys

import torch.distributed as dist

from ...devices.native_threads import let_threads_finish


def leave_at_exit() -> None:
    """When Python ends, leave the process group, if this process is still in one, and let its threads end their work.

    To be called once the group exists: what is registered last is run first.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def finish_at_exit() -> None:
    """Let the threads of a group that somebody else made end their work when Python ends."""
    atexit.unregister(_let_gloo_finish)
    atexit.register(_let_gloo_finish)


def _leave() -> None:
    """A process that ends by an error leaves without a word: others may be waiting for it, and it for them."""
    if dist.is_initialized() and getattr(sys, "last_type", None) is None:
        gc.collect()
        dist.destroy_process_group()
    _let_gloo_finish()


def _let_gloo_finish() -> None:
    let_threads_finish("pt_gloo_runloop")
