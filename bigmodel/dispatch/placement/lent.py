"""Weights that code outside their unit may compute with, found in the code of the modules around it.

Inputs are brought to a unit, but a module around units may use a weight of theirs itself: ``F.linear(x,
self.head.weight)``, a loop over an ``nn.ParameterList``, a user's hook. If units run on several devices, such weights
are marked (`outside_use.mark_lent`), so that they are copied to where they are used. A mark takes microseconds of each
operation that reads the weight, also in its own unit, so that not all weights have one.

What code reads is seen by the names in it: in forwards and hooks, and in the methods, properties and functions that
these call. A weight is taken for used if its name and that of its module are among them. Where code makes names as it
runs (``getattr(self, f"weight_{index}")``), or reads modules without naming them, it may read any of them.

What code reads that Python does not show, such as a compiled function, is an error when it happens (`mixed_devices`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..weights.parameters import content_of, hooks_of, plain_attributes
from .computed_names import computes_names
from .dispatch_units import DispatchUnit

_ALL = frozenset(
    (
        "parameters",
        "named_parameters",
        "buffers",
        "named_buffers",
        "get_parameter",
        "get_buffer",
        "state_dict",
        "_parameters",
        "_buffers",
    )
)
"""Methods and attributes that give out weights without naming them."""

_ALL_MODULES = frozenset(("modules", "named_modules", "children", "named_children", "get_submodule", "_modules"))
"""Methods and attributes that give out modules without naming them."""

COMPUTED = "getattr of a computed name"
"""Stands among the names that code reads for all that it may make as it runs."""

_LIBRARIES = frozenset(
    (
        "torch",
        "transformers",
        "diffusers",
        "timm",
        "torchvision",
        "sentence_transformers",
        "accelerate",
        "peft",
        "numpy",
    )
)
"""Packages of which only what is in the file of a module's class is read: what their models have in common computes
with what it is given."""

_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that compute otherwise, with other bits, if a weight is of a subclass."""


def lent_tensors(modules: Mapping[str, nn.Module], units: Sequence[DispatchUnit]) -> list[torch.Tensor]:
    """Return the tensors of a model that code outside their unit may compute with.

    Args:
        modules: The model's modules by name, not attached to yet.
        units: What the model is cut into.
    """
    inside = {id(part) for name, _, encloses in units if not encloses for part in modules[name].modules()}
    found: dict[int, torch.Tensor] = {}
    for module in {id(module): module for module in modules.values()}.values():
        if id(module) not in inside:
            found.update(_read_by(forward_of(module), type(module), [module]))
        own = {id(each) for each in (*module.modules(), *module._parameters.values(), *module._buffers.values())}
        held = [each for each in held_by(module) if id(each) not in own]
        if held:
            found.update(_read_by(forward_of(module), type(module), held))
        for hook in hooks_of(module):
            found.update(_read_by(hook, None, [module, *objects_of(hook)]))
    protected = {
        id(tensor)
        for module in modules.values()
        if isinstance(module, _FAST_PATHS)
        for tensor in (*module.parameters(), *module.buffers())
    }
    return [tensor for key, tensor in found.items() if key not in protected]


def _read_by(
    function: Callable[..., Any], kind: type | None, scopes: Collection[nn.Module | torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return, by id, what a function may read of the modules and tensors that it has."""
    names = names_read(function, kind)
    reads_all = COMPUTED in names or not names.isdisjoint(_ALL)
    any_module = reads_all or not names.isdisjoint(_ALL_MODULES)
    found: dict[int, torch.Tensor] = {}
    for scope in scopes:
        if isinstance(scope, torch.Tensor):
            found[id(scope)] = scope
            continue
        for path, owner in scope.named_modules():
            # Items of a list are named by the list; a list of parameters may be read by any code that has it.
            parts = [part for part in path.split(".") if part and not part.isdigit()]
            if parts and parts[-1] not in names and not any_module:
                continue
            is_list = isinstance(owner, (nn.ParameterList, nn.ParameterDict))
            for registry in (owner._parameters, owner._buffers):
                for key, tensor in registry.items():
                    if tensor is not None and (is_list or key in names or reads_all):
                        found[id(tensor)] = tensor
    return found


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return a module's own forward."""
    own: Callable[..., Any] = vars(module).get("forward", type(module).forward)
    return own


def held_by(module: nn.Module) -> Iterator[nn.Module | torch.Tensor]:
    """Yield the modules and parameters in plain attributes of a module, those in lists, tuples and dicts included."""
    yield from _members(plain_attributes(module))


def objects_of(function: Callable[..., Any]) -> Iterator[nn.Module | torch.Tensor]:
    """Yield the modules and parameters that a function has: bound, in its closure, or as arguments."""
    if isinstance(function, functools.partial):
        yield from _members((function.args, function.keywords))
        yield from objects_of(function.func)
    elif isinstance(function, types.MethodType):
        yield from _members(function.__self__)
        yield from objects_of(function.__func__)
    elif isinstance(function, types.FunctionType):
        yield from _members([content_of(cell) for cell in function.__closure__ or ()])
        yield from _members(function.__defaults__ or ())
    else:  # an object that can be called
        yield from _members(getattr(function, "__dict__", {}))


def _members(value: object) -> Iterator[nn.Module | torch.Tensor]:
    if isinstance(value, (nn.Module, nn.Parameter)):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _members(each)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _members(each)


def names_read(function: Callable[..., Any], kind: type | None) -> set[str]:
    """Return the names that a function reads (`COMPUTED` for those that it makes), and what it calls: methods and
    properties of `kind`, functions in its file and beside it, and those in its closure.

    Args:
        function: A forward, or a hook.
        kind: The class of the module whose forward it is; None: no method is followed.
    """
    file = None if kind is None else kind.__module__
    found: set[str] = set()
    stack: list[Any] = [function]
    seen: set[types.CodeType] = set()
    while stack:
        each = _plain_function(stack.pop())
        if not isinstance(each, types.FunctionType) or each.__code__ in seen:
            continue
        if seen and each.__module__ != file and _package(each.__module__) in _LIBRARIES:
            continue
        seen.add(each.__code__)
        names = names_in(each.__code__)
        found |= names
        if computes_names(each.__code__):
            found.add(COMPUTED)
        for name in names:
            stack += [vars(base)[name] for base in getattr(kind, "__mro__", ()) if name in vars(base)]
            stack.append(each.__globals__.get(name))
        stack += [content_of(cell) for cell in each.__closure__ or ()]
    return found


def _plain_function(value: Any) -> Any:
    """Return the function within a method, a property, a partial or an object that can be called."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    if callable(value) and not isinstance(value, (type, types.FunctionType, nn.Module)):
        value = vars(type(value)).get("__call__")
    return inspect.unwrap(value) if isinstance(value, types.FunctionType) else value


def names_in(code: types.CodeType) -> set[str]:
    """Return the attributes, globals and texts that are named in code, that of functions within it included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple):
            found.update(each for each in constant if isinstance(each, str))
        elif isinstance(constant, types.CodeType):
            found |= names_in(constant)
    return found


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]
