"""What a second computation needs in order to be the first one again: random numbers, precision, buffers; and outputs
through which gradients can flow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...devices.nested import iter_leaves
from ...errors import DispatchError


class Precision:
    """The autocast settings, for a device and the host, of the moment in which it is made."""

    def __init__(self, device: torch.device) -> None:
        kinds = [kind for kind in sorted({"cpu", device.type}) if torch.amp.is_autocast_available(kind)]
        self._settings = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within this context the settings are as they were then; afterwards as they were before."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._settings:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


class Surroundings:
    """The random state and the precision in which a block was first computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_state = torch.get_rng_state()
        self._device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._precision = Precision(device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within this context all is as it was then; afterwards as it was before."""
        devices = [self._device] if self._device_state is not None else []
        with torch.random.fork_rng(devices=devices), self._precision.restored():
            torch.set_rng_state(self._host_state)
            if self._device_state is not None:
                torch.cuda.set_rng_state(self._device_state, self._device)
            yield


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Give `module` its buffers back with the values they had: the second computation must not count twice in
    statistics, whether it writes to them or puts others in their place."""
    kept = [
        (part._buffers, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for registry, name, buffer, value in kept:
                registry[name] = buffer
                # Some kernels (batch norm's) write without raising the tensor's version, so values are compared.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def refuse_hidden_tensors(output: Any, arguments: Any) -> None:
    """Raise for tensors that gradients are wanted for and that lie in an object whose inside nobody knows.

    Args:
        output: What a module returned.
        arguments: What it was called with; what is handed through, as a cache is, may hold what it likes.

    Raises:
        DispatchError: There is one.
    """
    known = {id(leaf) for leaf in iter_leaves(arguments, registered=True)}
    for leaf in iter_leaves(output, registered=True):
        if isinstance(leaf, torch.Tensor) or id(leaf) in known:
            continue
        hidden = [name for name, held in getattr(leaf, "__dict__", {}).items() if isinstance(held, torch.Tensor)]
        if hidden:
            raise DispatchError(
                f"a streamed module returned a {type(leaf).__name__}, through whose {hidden[0]!r} no gradient would "
                "flow: return a tensor, tuple, list, dict or dataclass, or make the class known with "
                "torch.utils._pytree.register_pytree_node"
            )
