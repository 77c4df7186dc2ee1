"""One line for operations between parts that meet tensors of several devices, in place of PyTorch's error.

Inputs of parts are brought to them, and so are weights that code around them may read (`placement.lent`). Code that
dispatching cannot see through, such as a compiled function, may read others, or make tensors on a device that it names.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from torch import nn

from ...errors import DispatchError
from ..placement.lent import names_in
from ..streaming.gradients import Compute

_SAYS = "tensors to be on the same device"


def explained(module: nn.Module, compute: Compute) -> Compute:
    """Return `compute`, which calls `module`, with PyTorch's error of mixed devices explained by a DispatchError."""
    return functools.partial(_run, weakref.ref(module), compute)


def _run(model: weakref.ref[nn.Module], compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return compute(args, kwargs)
    except RuntimeError as error:
        dispatched = model()
        if isinstance(error, DispatchError) or _SAYS not in str(error) or dispatched is None:
            raise
        raise DispatchError(_explanation(dispatched, error)) from error


def _explanation(model: nn.Module, error: RuntimeError) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    found = [each for each in _frames(error.__traceback__) if id(each[0]) in names]
    module, function, read = found[-1] if found else (model, "forward", set())
    name = names[id(module)]
    weights = ", ".join(
        f"{name}.{path} on {tensor.device}" if name else f"{path} on {tensor.device}"
        for path, tensor in (*module.named_parameters(), *module.named_buffers())
        if "." in path and read.issuperset(part for part in path.split(".") if not part.isdigit())
    )
    reads = f", which reads {weights}," if weights else ""
    return (
        f"{type(module).__name__}.{function} of {name or 'the model'}{reads} computes with tensors of several devices: "
        f"{str(error).splitlines()[0]}. Map what it computes with to one device, or keep it whole with "
        f"no_split_module_classes=[{type(module).__name__!r}]"
    )


def _frames(traceback: TracebackType | None) -> Iterator[tuple[nn.Module, str, set[str]]]:
    """Yield the module, function and names of each frame of a module's method, the innermost last."""
    while traceback is not None:
        frame = traceback.tb_frame
        owner = frame.f_locals.get("self")
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if isinstance(owner, nn.Module) and package not in ("torch", "bigmodel"):
            yield owner, frame.f_code.co_name, names_in(frame.f_code)
        traceback = traceback.tb_next
