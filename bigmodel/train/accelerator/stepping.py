"""One training step: accumulation, backward, clipping, autocast, profiling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigmodel.errors import TrainError
from bigmodel.train.accelerator.base import AcceleratorCore
from bigmodel.train.data.batch_shard import MapSource
from bigmodel.train.data.loader import DataLoaderShard
from bigmodel.train.handlers import AutocastKwargs, ProfileKwargs
from bigmodel.train.precision.mixed import autocast_context
from bigmodel.train.types import DistributedType
from bigmodel.train.wrappers import uncompiled

_JOINABLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Stepping(AcceleratorCore):
    """The methods that a training loop calls at each step."""

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run one pass of an accumulation window; gradients are synchronized only in its last pass.

        Args:
            models: the prepared models whose gradients accumulate.
        """
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step, sync = 0, True
        else:
            self.step += 1
            sync = self.step % state.num_steps == 0
        state.sync_gradients = sync
        self.strategy.set_sync_gradients(sync)
        if sync or state.plugin.sync_each_batch:
            yield
            return
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self.no_sync(model))
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes leave gradients local."""
        return self.strategy.no_sync(uncompiled(model))

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward synchronizes gradients even if the forward ran under `no_sync`."""
        return self.strategy.trigger_sync_in_backward(uncompiled(model))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Back-propagate the loss, divided by the accumulation steps and scaled for fp16.

        Args:
            kwargs: passed to `Tensor.backward`.
        """
        steps = self.gradient_state.num_steps
        if steps > 1 and not self.strategy.divides_loss:
            loss = loss / steps
        self.strategy.backward(loss, self._scaler, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the fp16 loss scale, those of `optimizer` (one or several) or of all optimizers.

        In the middle of an accumulation window this does nothing, since scaled gradients will be added.
        """
        if self._scaler is None or not self.gradient_state.sync_gradients:
            return
        given = self._optimizers if optimizer is None else optimizer
        for item in given if isinstance(given, (list, tuple)) else [given]:
            self._scaler.unscale_(getattr(item, "optimizer", item))

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Scale gradients so that their total norm is at most `max_norm`. Return the norm before scaling.

        In the middle of an accumulation window the norm is only measured, since the sum is to be clipped.
        """
        sync = self.gradient_state.sync_gradients
        self.unscale_gradients()
        norm = self.strategy.clip_grad_norm_(_as_list(parameters), max_norm if sync else math.inf, norm_type)
        if not sync and self._scaler is not None and norm is not None:
            return norm / self._scaler.torch_scaler.get_scale()
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp gradients to [-clip_value, clip_value], at the end of an accumulation window."""
        if self.gradient_state.sync_gradients:
            self.unscale_gradients()
            self.strategy.clip_grad_value_(_as_list(parameters), clip_value)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Back-propagate and update in one pass with a prepared LOMO optimizer.

        Raises TrainError when none is prepared.
        """
        bare = [item.optimizer for item in self._optimizers]
        fused = [item for item in bare if hasattr(item, "fused_backward")]
        if not fused:
            raise TrainError("lomo_backward needs a prepared LOMO optimizer (with a fused_backward method)")
        for optimizer in fused:
            optimizer.fused_backward(loss, learning_rate)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context that computes in the Accelerator's precision."""
        return autocast_context(self.mixed_precision, self.device, autocast_handler or self.autocast_handler)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Profile the body. With an `output_trace_dir` each process writes a Chrome trace there."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))
        self.wait_for_everyone()

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let processes that run out of batches early take part in the communication of the others.

        Args:
            joinables: the prepared models.
            even_batches: for the body, whether prepared loaders of map-style datasets fill their last round.

        Where models are sharded or split this has no effect, and warns.
        """
        if self.distributed_type not in _JOINABLE:
            warnings.warn(
                "join_uneven_inputs is only supported for multi-GPU and multi-CPU training, where each process has the "
                f"whole model: it has no effect with {self.distributed_type.value}",
                stacklevel=3,
            )
            yield
            return
        bare = [uncompiled(model) for model in joinables]
        with uneven_batches(self._dataloaders, even_batches), self.strategy.join(bare):
            yield

    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> AbstractContextManager[Any]:
        """Return an empty context: sequences are not split (`ParallelismConfig` refuses a cp_size above 1)."""
        return nullcontext()


def _as_list(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


@contextmanager
def uneven_batches(loaders: Sequence[DataLoaderShard], even_batches: bool | None) -> Iterator[None]:
    """Within the body, set whether loaders of map-style datasets fill their last round; None changes nothing."""
    changed = []
    if even_batches is not None:
        for loader in loaders:
            source = loader.source
            if isinstance(source, MapSource):
                changed.append((source.shard, source.shard.even_batches))
                source.shard.even_batches = even_batches
            else:
                warnings.warn(
                    "even_batches is only supported for map-style datasets: it has no effect on a loader of an "
                    "iterable dataset",
                    stacklevel=5,
                )
    try:
        yield
    finally:
        for shard, before in changed:
            shard.even_batches = before
