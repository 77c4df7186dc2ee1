"""Gradient compression for DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from bigmodel.errors import TrainError
from bigmodel.train.handlers import DistributedDataParallelKwargs
from bigmodel.train.types import DDPCommunicationHookType as HookType

_HOOKS: dict[HookType, Any] = {
    HookType.FP16: default_hooks.fp16_compress_hook,
    HookType.BF16: default_hooks.bf16_compress_hook,
    HookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
    HookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS: dict[HookType, Any] = {
    HookType.FP16: default_hooks.fp16_compress_wrapper,
    HookType.BF16: default_hooks.bf16_compress_wrapper,
}


def register_comm_hook(model: TorchDDP, handler: DistributedDataParallelKwargs) -> None:
    """Register the handler's communication hook, wrapped as it says, if it names one.

    Raises:
        TrainError: the process group cannot exchange what the hook sends (bf16 over gloo).
    """
    hook = _HOOKS.get(handler.comm_hook)
    if hook is None:
        return
    wrap = _WRAPPERS.get(handler.comm_wrapper)
    if handler.comm_hook in (HookType.POWER_SGD, HookType.BATCHED_POWER_SGD):
        state: Any = powerSGD_hook.PowerSGDState(None, **handler.comm_state_option)
    else:
        state = None
    try:
        model.register_comm_hook(state, wrap(hook) if wrap is not None else hook)
    except TypeError as error:
        raise TrainError(f"comm_hook {handler.comm_hook} in {handler.comm_wrapper} cannot be used: {error}") from error
