"""Methods beside ``forward`` by which a module computes with its weights, as an autoencoder's ``decode`` does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

_SETTERS = ("_", "set_", "load", "reset", "init")
"""Names of methods begin so that are private or that change a module's weights."""


def methods_of(module: nn.Module) -> Iterator[str]:
    """Yield the public methods that the class of `module`, or others in its file, introduce and that take arguments.

    What overrides a method of a library's class is left alone, and so are methods that the instance has of its own.
    Those of PyTorch's containers compute nothing.
    """
    if type(module).__module__ == nn.Sequential.__module__:
        return
    own = [kind for kind in type(module).__mro__ if kind.__module__ == type(module).__module__]
    others = [kind for kind in type(module).__mro__ if kind not in own]
    seen: set[str] = set()
    for kind in own:
        for name, function in vars(kind).items():
            if name.startswith(_SETTERS) or name in seen or name == "forward" or name in module.__dict__:
                continue
            seen.add(name)
            if any(name in vars(other) for other in others) or not inspect.isfunction(function):
                continue
            if len(inspect.signature(function).parameters) > 1 and not inspect.isgeneratorfunction(function):
                yield name
