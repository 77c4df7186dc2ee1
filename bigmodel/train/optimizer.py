"""The optimizer that `prepare` returns: it steps at the end of an accumulation window."""

from __future__ import annotations

import _signal as signal  # the module `signal` converts results to enums, which takes ten times as long as the call
import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bigmodel.train.precision.scaling import LossScaler
from bigmodel.train.state.gradient import GradientState
from bigmodel.train.strategies.base import Strategy


class DeferredInterrupt:
    """A context that defers Ctrl-C to the end of its body; a second Ctrl-C takes effect at once.

    It has no effect outside the main thread, or if the program handles the signal itself.
    """

    def __enter__(self) -> None:
        self._received = False
        self._deferring = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._deferring:
            signal.signal(signal.SIGINT, self._on_signal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._deferring:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._received and kind is None:
                raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            raise KeyboardInterrupt
        self._received = True


def move_state_to_parameters(optimizer: Optimizer) -> None:
    """Move the state of an optimizer that has stepped, or was loaded, to the devices of its parameters.

    Scalars stay: PyTorch counts steps on the host.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.device != parameter.device:
                state[name] = value.to(parameter.device)


class AcceleratedOptimizer(Optimizer):
    """An `Optimizer` by type, which delegates to `optimizer`.

    Args:
        optimizer: the user's optimizer.
        strategy: performs the steps.
        scaler: the fp16 loss scaler, or None.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, scaler: LossScaler | None = None) -> None:
        # Optimizer.__init__ is not called, since this class delegates to `optimizer`.
        self.optimizer = optimizer
        self.scaler = scaler
        self.strategy = strategy
        self.gradient_state = GradientState()
        self._step_was_skipped = False

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def state(self) -> Any:
        """The optimizer's state by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's default options."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients overflowed in fp16."""
        return self._step_was_skipped

    @property
    def _is_overflow(self) -> bool:
        """`step_was_skipped`, under the name that other libraries also set it by."""
        return self._step_was_skipped

    @_is_overflow.setter
    def _is_overflow(self, skipped: bool) -> None:
        self._step_was_skipped = skipped

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients if this pass ends an accumulation window and they did not overflow.

        Ctrl-C takes effect after the step, so that weights and optimizer state stay consistent; with a `closure`, which
        may compute for long, at once.
        """
        if not self.gradient_state.sync_gradients:
            return
        with DeferredInterrupt() if closure is None else nullcontext():
            self._step_was_skipped = not self.strategy.optimizer_step(self.optimizer, self.scaler, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients if this pass ends an accumulation window."""
        if self.gradient_state.sync_gradients:
            self.strategy.zero_grad(self.optimizer, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch a schedule-free optimizer to training."""
        self._switch("train")

    def eval(self) -> None:
        """Switch a schedule-free optimizer to evaluation."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        method = getattr(self.optimizer, mode, None)
        if inspect.ismethod(method):
            method()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "gradient_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gradient_state = GradientState()

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"
