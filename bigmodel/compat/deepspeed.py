"""DeepSpeed as ``accelerate.utils`` names it: an engine and its optimizer wrapped, and its optimizers for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..train.accelerator_state import AcceleratorState
from ..train.optimizer import AcceleratedOptimizer
from ..train.state.gradient import GradientState
from ..train.strategies.deepspeed.engine import import_deepspeed
from ..train.types import DistributedType

F = TypeVar("F", bound=Callable[..., Any])


def deepspeed_required(func: F) -> F:
    """Decorate a function to raise ValueError when it is called in a run that does not use DeepSpeed."""

    @wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if AcceleratorState._shared_state and AcceleratorState().distributed_type != DistributedType.DEEPSPEED:
            raise ValueError(f"{func.__name__} needs DeepSpeed: give the Accelerator a deepspeed_plugin")
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]


class DeepSpeedEngineWrapper:
    """A DeepSpeed engine whose backward steps at the end of an accumulation window.

    Args:
        engine: What `deepspeed.initialize` returned first.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Back-propagate, and step if `sync_gradients`: optimizer, scheduler, clipping and zeroing are the engine's."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> Any:
        """Return the norm of all gradients at the last step, as a number."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if hasattr(norm, "item") else norm


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine, which steps and zeroes by itself: both do nothing here.

    Args:
        optimizer: The engine's.
    """

    def __init__(self, optimizer: Any) -> None:
        # AcceleratedOptimizer.__init__ is not called: no strategy steps here.
        self.optimizer = optimizer
        self.scaler = None
        self.gradient_state = GradientState()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Do nothing."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine skipped its last step because gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """Return DeepSpeed's optimizer for the host in place of one of PyTorch: Adagrad for Adagrad, else Adam.

    Learning rate and weight decay are kept; Adam decays as AdamW where `optimizer` is one.

    Raises:
        TrainError: DeepSpeed is not installed.
    """
    import_deepspeed(torch.device("cpu"))
    kept = {name: value for name, value in optimizer.defaults.items() if name in ("lr", "weight_decay")}
    if isinstance(optimizer, torch.optim.Adagrad):
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad(optimizer.param_groups, **kept)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=isinstance(optimizer, torch.optim.AdamW), **kept)


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Within this context parameters that DeepSpeed shards (stage 3) are whole; in other runs nothing is done.

    Args:
        modifier_rank: The rank whose changes are kept; None: there are none.
        fwd_module: The module whose forward runs within.
        enabled: Gather.
    """
    state = AcceleratorState()
    plugin = state.deepspeed_plugin if state.distributed_type == DistributedType.DEEPSPEED else None
    gathered: AbstractContextManager[Any] = nullcontext()
    if plugin is not None and plugin.zero_stage == 3:
        zero = import_deepspeed(state.device).zero
        gathered = zero.GatheredParameters(params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled)
    with gathered:
        yield
