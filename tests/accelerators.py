"""The accelerators that a test runs on: virtual ones on any machine, or CUDA's with ``pytest --device cuda``.

A test that asks for the fixture `every_accelerator` runs on either kind. It names them by `at(0)` and `at(1)`, and
asks `held` what lies on one. What CUDA cannot do is marked: `exact` for limits and counters that only the virtual
accelerator keeps to the byte, `two` for a second accelerator.

A process runs tests of one kind: once the device type of virtual accelerators is registered, PyTorch takes it for the
machine's accelerator, and pins no memory for CUDA.
"""

from __future__ import annotations

import gc
import inspect
import re
from functools import cache

import pytest
import torch

from bigmodel.devices import accelerators, memory_allocated

NEEDS_VIRTUAL = re.compile(r"""["']virtual["':]""")
"""What tests say that are about virtual accelerators alone."""

_MAKES_VIRTUAL = re.compile(r"\bvirtual\.(enable|disable|configure|link|host_waits|races)\(")

exact = pytest.mark.virtual_only("limits and counters that are exact to the byte")
two = pytest.mark.two_accelerators


def at(index: int) -> str:
    """Return the name of the accelerator with this index, as ``"virtual:0"``."""
    return accelerators()[index]


def held(index: int) -> int:
    """Return the bytes of tensors on an accelerator, without what its libraries keep for themselves."""
    gc.collect()
    if at(index).startswith("cuda"):
        torch._C._cuda_clearCublasWorkspaces()
    return memory_allocated(index)


def skip_what_is_missing(kind: str, node: pytest.Item) -> None:
    """Skip a test on CUDA that needs what CUDA, or this machine's, has not got."""
    if kind == "virtual":
        return
    only = node.get_closest_marker("virtual_only")
    if only is not None:
        pytest.skip(f"needs the virtual accelerator: {only.args[0]}")
    if node.get_closest_marker("two_accelerators") is not None and len(accelerators()) < 2:
        pytest.skip("needs two CUDA devices, this machine has one")


def skip_without_virtual(*_: object, **__: object) -> None:
    """Skip the test that calls this in place of `virtual.enable`, in a process that tests CUDA's.

    The device type of virtual accelerators would be PyTorch's accelerator for all tests after it.
    """
    pytest.skip("needs the virtual accelerator: it enables some")


def is_about_virtual(item: pytest.Item) -> bool:
    """Whether a test is about virtual accelerators alone: by its mark, its fixtures, its parameters, or its text."""
    if item.get_closest_marker("virtual_only") is not None:
        return True
    names = set(getattr(item, "fixturenames", ()))
    if "accelerators" in names:
        return True
    given = getattr(getattr(item, "callspec", None), "params", {})
    if NEEDS_VIRTUAL.search(repr([value for name, value in given.items() if name != "every_accelerator"])):
        return True
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    fixtures = [each.func for name in names for each in definitions.get(name, ()) if _is_of_module(each.func, item)]
    return any(_names_virtual(function) for function in [getattr(item, "function", None), *fixtures])


def _is_of_module(function: object, item: pytest.Item) -> bool:
    return getattr(function, "__module__", None) == getattr(getattr(item, "module", None), "__name__", "")


@cache
def _names_virtual(function: object) -> bool:
    """Whether a function of tests names a virtual accelerator, or makes one."""
    try:
        text = inspect.getsource(function)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return False
    own = text[text.index("def ") :] if "def " in text else text  # parameters in decorators concern some cases only
    return NEEDS_VIRTUAL.search(own) is not None or _MAKES_VIRTUAL.search(own) is not None
