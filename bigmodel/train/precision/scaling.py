"""Loss scaling for fp16, with any number of optimizers: steps whose gradients overflow are skipped and reported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

logger = logging.getLogger(__name__)


class LossScaler:
    """A `torch.amp.GradScaler` whose scale changes once per backward window, not once per optimizer.

    The scale must not change between the backward pass and the last optimizer's step, since gradients must be unscaled
    by the factor that scaled them. `update` is therefore deferred until the next loss is scaled (or the state is read),
    when every optimizer has stepped.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._update_is_due = False
        self._unscaled: set[int] = set()

    @property
    def torch_scaler(self) -> Any:
        """The `GradScaler`, after a pending update."""
        self.flush()
        return self._scaler

    def flush(self) -> None:
        """Run the pending update, if any."""
        if self._update_is_due:
            self._scaler.update()
            self._update_is_due = False
            self._unscaled.clear()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the scale."""
        self.flush()
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale; a second call before the step does nothing."""
        if id(optimizer) not in self._unscaled:
            self._scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step unless a gradient overflowed. Return whether the step was made."""
        if not self._scaler.is_enabled():
            optimizer.step(closure) if closure is not None else optimizer.step()
            return True
        self._scaler.step(optimizer, closure) if closure is not None else self._scaler.step(optimizer)
        self._update_is_due = True
        overflowed = any(found.item() for found in self._scaler._found_inf_per_device(optimizer).values())
        if overflowed:
            logger.warning("gradients overflowed in fp16: this optimizer step is skipped and the loss scale is lowered")
        return not overflowed

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, after a pending update."""
        return dict(self.torch_scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.flush()  # also resets the per-optimizer state since the last update
        self._scaler.load_state_dict(state)
