"""DistributedDataParallel: every process has the whole model; gradients are averaged, optionally compressed."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from bigmodel.train.handlers import DistributedDataParallelKwargs
from bigmodel.train.strategies.single import SingleProcess
from bigmodel.train.types import DistributedType


class DistributedDataParallel(SingleProcess):
    """Models that train are wrapped in `torch.nn.parallel.DistributedDataParallel`."""

    distributed_type = DistributedType.MULTI_GPU

    def prepare_model(self, model: nn.Module, *, device_placement: bool, evaluation_mode: bool) -> nn.Module:
        """Move the model to its device and wrap it, unless no parameter requires gradients."""
        model = super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        handler = self.settings.handlers.get(DistributedDataParallelKwargs, DistributedDataParallelKwargs())
        device = self.settings.device
        wrapped = TorchDDP(
            model,
            device_ids=None if device.type == "cpu" or not device_placement else [device],
            **handler.to_kwargs(),
        )
        handler.register_comm_hook(wrapped)
        atexit.register(_let_go, weakref.ref(wrapped))
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside the wrapper."""
        return model.module if isinstance(model, TorchDDP) else model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Leave gradients local to this process."""
        return model.no_sync() if isinstance(model, TorchDDP) else nullcontext()

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Average gradients in this backward even if its forward ran under `no_sync`."""
        if not isinstance(model, TorchDDP):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Let processes that have no more batches take part in the communication of the others."""
        return Join(list(joinables), enable=True, throw_on_early_termination=False)


def _let_go(reference: weakref.ref[TorchDDP]) -> None:
    """At the end of the process, before its group is left, drop what still uses the group."""
    model = reference()
    if model is not None:
        for name in ("reducer", "logger", "process_group"):
            model.__dict__.pop(name, None)
