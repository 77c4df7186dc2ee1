"""What processes tell each other: tensors, metrics, a trigger."""

from __future__ import annotations

from typing import Any

import torch

from bigmodel.train.accelerator.base import AcceleratorCore
from bigmodel.train.metrics import gather_for_metrics
from bigmodel.train.operations.collectives import gather, reduce
from bigmodel.train.operations.padding import pad_across_processes


class Exchange(AcceleratorCore):
    """Operations across processes."""

    _trigger: bool

    def gather(self, tensor: Any) -> Any:
        """Return every process's tensors concatenated along the first dimension."""
        return gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what was computed from the current batch, exactly one entry for each sample of the dataset.

        See `bigmodel.train.metrics.gather_for_metrics`.
        """
        return gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the "sum" or "mean" over processes of every tensor, times `scale`."""
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors along `dim` to the largest size on any process."""
        return pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Raise this process's flag, to be seen by every process in `check_trigger`."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any process raised its flag since the last check; all flags are lowered then.

        Every process must call it.
        """
        raised = reduce(torch.tensor([int(self._trigger)], device=self.device), "sum")
        if int(raised.item()) == 0:
            return False
        self._trigger = False
        return True
