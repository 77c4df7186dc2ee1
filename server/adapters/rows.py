"""Add LoRA adapters to the rows of a step that ask for them, so that one pass over the base model serves all.

The base model's products are computed once for all rows. To those of a request with an adapter, each of the adapter's
modules adds ``scaling * up(down(input))``: Hu et al. 2021, https://arxiv.org/abs/2106.09685. Nothing of the model is
changed, so it may be streamed, quantised or split as any other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from bigmodel.devices.pinned import on_device
from bigmodel.errors import ServeError
from bigmodel.server.adapters.files import CHUNK_ROWS, Adapter, LowRank

_active = threading.local()


class Rows(NamedTuple):
    """Rows ``begin`` to ``end`` of a step, which belong to a request with the adapter ``name``."""

    name: str
    begin: int
    end: int


class Adapters:
    """The adapters of a model.

    Args:
        model: The base model, dispatched or not.
        adapters: Its adapters.
        row_multiple: Rows of a product are padded to a multiple of it: see :mod:`..engine.compute.host_linear`.

    Raises:
        ServeError: The model has no module that an adapter names, or one of another shape.
    """

    def __init__(self, model: nn.Module, adapters: Seq[Adapter], row_multiple: int = 1) -> None:
        self.names = tuple(adapter.name for adapter in adapters)
        self._multiple = row_multiple
        by_module: dict[str, dict[str, _Placed]] = {}
        for adapter in adapters:
            check_parts(model, adapter)
            for name, part in adapter.parts.items():
                by_module.setdefault(name, {})[adapter.name] = _Placed(part)
        self._hooks = [(model.get_submodule(name), _Hook(self, parts)) for name, parts in by_module.items()]
        self._handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in self._hooks]

    @contextmanager
    def step(self, rows: Seq[Rows]) -> Iterator[None]:
        """Add adapters in forwards of this thread inside the context, whose inputs are [1, rows of the step, width]."""
        wanted: dict[str, list[int]] = {}
        for name, begin, end in rows:
            if name:
                wanted.setdefault(name, []).extend(range(begin, end))
        _active.step = _Step(self, {name: torch.tensor(own) for name, own in wanted.items()}) if wanted else None
        try:
            yield
        finally:
            _active.step = None

    def add(self, parts: Mapping[str, _Placed], given: torch.Tensor, output: torch.Tensor) -> None:
        """Add to a module's output [1, rows, output width] what its parts make of the input [1, rows, input width]."""
        step: _Step | None = getattr(_active, "step", None)
        for name in () if step is None or step.of is not self else step.rows.keys() & parts.keys():
            assert step is not None
            part = parts[name].on(given.device)
            for rows in step.on(name, given.device).split(CHUNK_ROWS):
                own = given.index_select(1, rows).to(part.down.dtype)
                padded = functional.pad(own, (0, 0, 0, -len(rows) % self._multiple))
                change = functional.linear(functional.linear(padded, part.down), part.up) * part.scaling
                # Added in the wider dtype of both, and rounded once: as peft does.
                added = output.index_select(1, rows) + change[:, : len(rows)]
                output.index_copy_(1, rows, added.to(output.dtype))

    def remove(self) -> None:
        """Leave the model as it was, and let go of the adapters' memory, whoever still holds the model."""
        for handle in self._handles:
            handle.remove()
        for _, hook in self._hooks:
            hook.parts.clear()
        self._hooks, self._handles = [], []


class _Step:
    """Rows by the name of their adapter ``of`` a model, on each device that asked for them."""

    def __init__(self, of: Adapters, rows: Mapping[str, torch.Tensor]) -> None:
        self.of = of
        self.rows = rows
        self._on: dict[tuple[str, torch.device], torch.Tensor] = {}

    def on(self, name: str, device: torch.device) -> torch.Tensor:
        found = self._on.get((name, device))
        if found is None:
            found = self._on[name, device] = on_device(self.rows[name], device)
        return found


class _Placed:
    """A part of an adapter, on the device that its module runs on."""

    def __init__(self, part: LowRank) -> None:
        self._part = part

    def on(self, device: torch.device) -> LowRank:
        part = self._part
        if part.down.device != device:
            part = self._part = LowRank(part.down.to(device), part.up.to(device), part.scaling)
        return part


class _Hook:
    """A forward hook that adds the parts of one module."""

    def __init__(self, adapters: Adapters, parts: dict[str, _Placed]) -> None:
        self._adapters, self.parts = adapters, parts

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._adapters.add(self.parts, args[0] if args else next(iter(kwargs.values())), output)


def check_parts(model: nn.Module, adapter: Adapter) -> None:
    """Check that a model, which may be on meta, has the modules of an adapter.

    Raises:
        ServeError: It has no module that the adapter names, one of another shape, or one whose adapters are not served.
    """
    for name, part in adapter.parts.items():
        _check(adapter.name, model, name, part)


def _check(adapter: str, model: nn.Module, name: str, part: LowRank) -> None:
    where = f"adapter '{adapter}': {name}"
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise ServeError(f"{where} is not in {type(model).__name__}: it was made for another model") from error
    widths = _widths(module)
    if widths is None:
        raise ServeError(f"{where} is a {type(module).__name__}; adapters of linear layers are served")
    if module is getattr(model, "get_output_embeddings", lambda: None)():
        raise ServeError(
            f"{where} gives the logits, which are computed for some rows only; adapters of it are not served"
        )
    made_for = part.down.shape[1], len(part.up)
    if widths != made_for:
        raise ServeError(
            f"{where} takes {widths[0]} values and gives {widths[1]}, and the adapter was made for {made_for[0]} and "
            f"{made_for[1]}: it is another model's"
        )
    if ".experts." in f".{name}.":
        raise ServeError(
            f"{where} is an expert, which sees the tokens that were sent to it; adapters of it are not served"
        )


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Input and output width of a linear layer: PyTorch's, a quantised one, or GPT-2's; None for another module."""
    taken, given = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(taken, int) and isinstance(given, int):
        return taken, given
    taken, given = getattr(module, "nx", None), getattr(module, "nf", None)  # transformers' Conv1D
    return (taken, given) if isinstance(taken, int) and isinstance(given, int) else None
