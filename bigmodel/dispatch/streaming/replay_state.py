"""State that makes a recomputation equal to the first computation: random state, autocast settings, buffers.

Also checks outputs for tensors that would get no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...devices.nested import iter_leaves
from ...errors import DispatchError
from ..weights.block import Block, Registry, version_of


class Precision:
    """The autocast settings, for a device and the host, at the time of its creation."""

    def __init__(self, device: torch.device) -> None:
        kinds = [kind for kind in sorted({"cpu", device.type}) if torch.amp.is_autocast_available(kind)]
        self._settings = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore these settings within this context."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._settings:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


class ReplayState:
    """The random state and autocast settings of a block's first computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_state = torch.get_rng_state()
        self._device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._precision = Precision(device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore that state within this context."""
        devices = [self._device] if self._device_state is not None else []
        with torch.random.fork_rng(devices=devices), self._precision.restored():
            torch.set_rng_state(self._host_state)
            if self._device_state is not None:
                torch.cuda.set_rng_state(self._device_state, self._device)
            yield


class EarlierState:
    """The buffers that a block's forward writes, with the values they had before it.

    Some modules compute with what they write, as spectral norm does with its estimates: the second computation must
    begin with what the first one began with. Which buffers those are shows in the first forward, before which all are
    copied; later ones copy only these.

    Args:
        block: Whose module is about to be computed.
        module: That module, with all its tensors shown.
    """

    def __init__(self, block: Block, module: nn.Module) -> None:
        self._block = block
        if block.registries_of_buffers is None:
            block.registries_of_buffers = [part._buffers for part in module.modules() if part._buffers]
        written = block.written_buffers
        self._before: list[tuple[Registry, str, torch.Tensor, int, bool]] = [
            (registry, name, buffer, version_of(buffer), written is None or (id(registry), name) in written)
            for registry in block.registries_of_buffers
            for name, buffer in registry.items()
            if buffer is not None
        ]
        self._values = [buffer.clone() if copied else None for _, _, buffer, _, copied in self._before]

    def keep_written(self) -> None:
        """Keep the values of what has been written since, and let go of the others.

        Raises:
            DispatchError: The forward wrote to a buffer that the first one did not write to.
        """
        kept = []
        for (registry, name, buffer, version, copied), value in zip(self._before, self._values, strict=True):
            if registry.get(name) is buffer and version_of(buffer) == version:
                continue
            if not copied:
                raise DispatchError(
                    f"{name!r} in {self._block.name!r} is written in some forwards only, so that gradients through "
                    "this streamed module would be wrong: map it to an accelerator to train it"
                )
            kept.append((registry, name, value))
        if self._block.written_buffers is None:
            self._block.written_buffers = {(id(registry), name) for registry, name, _ in kept}
        self._kept = kept
        self._before, self._values = [], []

    def put_back(self) -> None:
        """Let the module begin with the values of then."""
        for registry, name, value in self._kept:
            registry[name] = None if value is None else value.clone()


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of `module` and their values at the end of this context: a recomputation must not update
    statistics a second time, by writing to buffers or replacing them."""
    saved = [
        (part._buffers, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for registry, name, buffer, _ in saved:
                registry[name] = buffer
            # Some kernels (batch norm's) write without incrementing the version counter, so values are compared.
            for buffer, value in _differing([(buffer, value) for _, _, buffer, value in saved]):
                buffer.copy_(value)


def _differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pairs of tensors whose values differ; the host waits for each device once, not for each pair."""
    found = []
    by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for buffer, value in pairs:
        by_device.setdefault(buffer.device, []).append((buffer, value))
    for each in by_device.values():
        differ = torch.stack([(buffer != value).any() for buffer, value in each]).tolist()
        found += [pair for pair, differs in zip(each, differ, strict=True) if differs]
    return found


def refuse_hidden_tensors(output: Any, arguments: Any) -> None:
    """Check that every tensor in a module's output can be found, so that it gets a gradient.

    Args:
        output: The output.
        arguments: The arguments of the call; objects passed through, such as caches, are not checked.

    Raises:
        DispatchError: A tensor is an attribute of an object of an unknown class.
    """
    known = {id(leaf) for leaf in iter_leaves(arguments, registered=True)}
    for leaf in iter_leaves(output, registered=True):
        if isinstance(leaf, torch.Tensor) or id(leaf) in known:
            continue
        hidden = [name for name, value in getattr(leaf, "__dict__", {}).items() if isinstance(value, torch.Tensor)]
        if hidden:
            raise DispatchError(
                f"a streamed module returned a {type(leaf).__name__}, through whose {hidden[0]!r} no gradient would "
                "flow: return a tensor, tuple, list, dict or dataclass, or register the class with "
                "torch.utils._pytree.register_pytree_node"
            )
