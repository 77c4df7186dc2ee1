"""`MicroBatches`: a forward of a batch in parts of fewer rows, several of which are in the stages of the model at once.

Each part is computed as a step in flight (`..transfer.stages`), with the bits of a call with its rows alone. Those of
one call with all rows may differ in the last bits, as kernels are chosen by the number of rows: so it is done only
where the plan says so. The host launches as many parts as may be in flight, and returns once all are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ...devices.forks import new_lock
from ...devices.rows import cut_rows, join_rows, row_count
from ...errors import DispatchError
from ...plan.memory.micro_batches import most_in_flight
from ..streaming.streamer import is_transformed
from ..transfer.stages import StagePipeline, StageStep, running_step
from .attached_forward import AttachedForward
from .refusals import NotCopied


class MicroBatches(NotCopied):
    """Computes the forward of a model in stages.

    A call is computed whole if it is for gradients or transformed, is itself a part of a step in flight, is given an
    object such as a cache, or has no more rows than a part.

    Args:
        root: The model's own attachment.

    Attributes:
        pipeline: The stages; None: there are none yet.
        size: Rows of a part; None: a call is computed whole, or in `parts` parts.
        parts: Their number, where `size` is None.
        without_gradients: Whether all calls are for inference, whatever the mode of autograd.
    """

    def __init__(self, root: AttachedForward, size: int | None) -> None:
        self._root = root
        self._lock = new_lock()
        self.pipeline: StagePipeline | None = None
        self.size = size
        self.parts: int | None = None
        self.without_gradients = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call of the model.

        Raises:
            DispatchError: An output is neither the same for all parts nor has a row for each row of the batch.
            Exception: That of the first part that failed, once no other is in flight.
        """
        if self.size is None and self.parts is None:
            return self._root.plain(args, kwargs)
        with torch.no_grad() if self.without_gradients and torch.is_grad_enabled() else nullcontext():
            found = self._rows_and_size(args, kwargs)
            if found is None:
                return self._root.plain(args, kwargs)
            with self._lock:  # the stages belong to one call at a time
                return self._in_parts(args, kwargs, *found)

    def _rows_and_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
        """Return the rows of a call, and those of each part; None if it is computed whole."""
        if torch.is_grad_enabled() or running_step() is not None or is_transformed() or torch.compiler.is_compiling():
            return None
        rows = row_count((args, kwargs))
        if not rows:
            return None
        size = self.size if self.size is not None else -(-rows // (self.parts or 1))
        return (rows, size) if size < rows else None

    def _in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, size: int) -> Any:
        pipeline = self.pipeline
        assert pipeline is not None
        most = most_in_flight(len(set(pipeline.devices)))
        flying: deque[StageStep] = deque()
        outputs: list[Any] = []
        counts: list[int] = []
        try:
            for start in range(0, rows, size):
                if len(flying) == most:
                    flying.popleft().land()
                with pipeline.step() as step:
                    flying.append(step)
                    outputs.append(self._root.plain(*cut_rows((args, kwargs), rows, start, start + size)))
                counts.append(min(size, rows - start))
            while flying:
                flying.popleft().land()
        except BaseException as error:
            _wait_for(flying, error)
            pipeline.follow()
            raise
        pipeline.follow()
        return join_rows(outputs, counts, _refusal, pipeline.reads)


def _wait_for(flying: Sequence[StageStep], error: BaseException) -> None:
    """Block until no step is in flight; note in `error` what went wrong with others."""
    for step in flying:
        try:
            step.land()
        except Exception as other:
            error.add_note(f"another micro-batch failed, too: {type(other).__name__}: {other}")


def _refusal(what: str) -> DispatchError:
    return DispatchError(
        f"the model returns {what} that has no row for each row of its input, such as a loss, so it cannot be put "
        "together from micro-batches: call it without what makes that output, or plan with micro_batch_size=None"
    )
