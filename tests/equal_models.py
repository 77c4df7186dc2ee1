"""What tells two models of transformers apart, so that tests compute once what is the same for equal ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from bigmodel.dispatch.attach.dispatched import dispatched

_OWN = (
    "transformers.models.",
    "transformers.integrations.",
    "transformers.activations",
    "torch.nn.modules.",
    "bigmodel.profile.model.stage",
)
_PLAIN = (int, float, str, bool, tuple, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def description(model: nn.Module) -> Hashable | None:
    """Return a value that is equal for models that do the same but for the values of their weights: modules, settings,
    tensors with their places and ties. None for a model with modules or hooks of its own, which may do anything."""
    return _description(model, _is_as_made)


def placed_description(model: nn.Module) -> Hashable | None:
    """Return such a value of a dispatched model, with the plan that it was dispatched by."""
    placed = dispatched(model)
    if placed is None:
        return None
    described = _description(model, _is_as_placed)
    return None if described is None else (described, placed.plan.to_json(), placed.main_device)


def _description(model: nn.Module, is_known: Callable[[nn.Module], bool]) -> Hashable | None:
    config = getattr(model, "config", None)
    modules = dict(model.named_modules(remove_duplicate=False))
    if config is None or not all(map(is_known, modules.values())):
        return None
    first: dict[int, str] = {}
    tensors = tuple(
        (name, first.setdefault(id(t), name), type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
        for name, t in named_tensors(model).items()
    )
    parts = tuple((name, type(module), _settings(module)) for name, module in modules.items())
    return parts, tensors, _values(config), str(getattr(model, "generation_config", None))


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, tied ones under each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def _is_as_made(module: nn.Module) -> bool:
    own = vars(module)
    changed = "forward" in own or any(own.get(name) for name in (*_HOOKS, "exchange"))
    return type(module).__module__.startswith(_OWN) and not changed


def _is_as_placed(module: nn.Module) -> bool:
    own = vars(module)
    added = [own.get("forward"), *(hook for name in _HOOKS for hook in own.get(name, {}).values())]
    changed = any(each is not None and not type(each).__module__.startswith("bigmodel.dispatch") for each in added)
    changed = changed or own.get("exchange") is not None  # of a stage, with whatever it is connected to
    return type(module).__module__.startswith(_OWN) and not changed


def _settings(module: nn.Module) -> str:
    return repr([item for item in vars(module).items() if isinstance(item[1], _PLAIN)])


def _values(config: Any) -> str:
    """Return all values of a config, also those that it does not write to its file."""
    values = [(name, _values(v) if hasattr(v, "to_dict") else repr(v)) for name, v in sorted(vars(config).items())]
    return repr(values)
