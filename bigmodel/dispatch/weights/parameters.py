"""Moves parameters without losing their class and attributes, also in recurrent layers.

Recurrent layers (``nn.LSTM``, ...) refer to each weight by name and in the list ``_flat_weights``. Assigning an
attribute updates both; dispatching writes to ``_parameters`` directly, so it must update the list too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from ...devices import HOST, is_accelerator, virtual
from ...errors import DispatchError
from .outside_use import PLAIN


def like(original: torch.Tensor, value: torch.Tensor, requires_grad: bool | None = None) -> torch.Tensor:
    """Return `value` as a Parameter with the class and attributes of `original`; as it is if that is a plain tensor.

    Args:
        original: The tensor that `value` replaces.
        value: The new elements; not copied.
        requires_grad: Whether the new Parameter requires a gradient; None takes it from `original`.
    """
    if not isinstance(original, nn.Parameter):
        return value
    wants = original.requires_grad if requires_grad is None else requires_grad
    wants = wants and (value.is_floating_point() or value.is_complex())
    kind = PLAIN.get(type(original), type(original))
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter and type(value) is torch.Tensor:
        result: nn.Parameter = torch.Tensor._make_subclass(kind, value, wants)
    else:
        result = nn.Parameter(value, requires_grad=wants)
    if original.__dict__:
        result.__dict__.update(virtual.user_attributes(original))
    return result


def moved_like(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return `tensor` on `device`, a Parameter with the same attributes and hooks if it is one."""
    moved = like(tensor, tensor.detach().to(device=device, dtype=dtype or tensor.dtype))
    if moved.requires_grad and tensor.is_leaf and moved is not tensor:
        # The dicts themselves, so that the handles people have still remove hooks.
        if tensor._backward_hooks:
            moved._backward_hooks = tensor._backward_hooks
        for hook in (tensor._post_accumulate_grad_hooks or {}).values():
            moved.register_post_accumulate_grad_hook(hook)
    return moved


def take_over(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Exchange the content and class of a parameter with those of its moved copy: holders of the parameter, such as an
    optimizer that was built before, see it on its new device. Gradients stay with the former content.

    Args:
        parameter: A parameter of a model; any other tensor is left alone.
        value: The result of `moved_like` for it.

    Returns:
        False, and nothing is changed: `parameter` is not a parameter, or another reference to it would not follow.
    """
    if not isinstance(parameter, nn.Parameter) or parameter is value:
        return False
    with DisableTorchFunctionSubclass():
        before = [(each, type(each), each.__dict__) for each in (parameter, value)]
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        try:
            torch.utils.swap_tensors(parameter, value)
        except RuntimeError:
            for each, kind, attributes in before:
                each.__class__, each.__dict__ = kind, attributes
            return _exchange_data(parameter, value)
        # Dicts of hooks belong to the object, what calls them to what it holds.
        if parameter.requires_grad:
            parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks
            if isinstance(parameter, virtual.VirtualTensor):
                virtual.guard_hooks(parameter)
    return True


def _exchange_data(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Exchange the elements of two tensors to which weak references may exist; return whether their kinds allow it."""
    if type(parameter) is not type(value) or not torch._has_compatible_shallow_copy_type(parameter, value):
        return False
    gradients = parameter.grad, value.grad
    parameter.grad = value.grad = None
    with torch.inference_mode(parameter.is_inference()):
        held = parameter.data
        parameter.data = value.data
        value.data = held
    value.grad, parameter.grad = gradients
    return True


def moved_in_place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`, with its gradient: itself if it is there or is a parameter that can be moved
    (`take_over`)."""
    if tensor.device == device:
        return tensor
    moved = moved_like(tensor, device)
    if tensor.is_leaf and tensor.grad is not None:
        moved.grad = tensor.grad.to(device)
    return tensor if take_over(tensor, moved) else moved


class SecondPlace(NamedTuple):
    """A further reference of a recurrent layer to a weight, in a list that its forward may replace by another.

    Attributes:
        module: The layer, referenced weakly to avoid a cycle.
        place: The index in its list.
    """

    module: weakref.ref[nn.RNNBase]
    place: int

    @property
    def weights(self) -> list[Any]:
        """The list that the layer computes with now."""
        module = self.module()
        assert module is not None, "the module is gone"
        found: list[Any] = module._flat_weights
        return found

    def show(self, tensor: torch.Tensor) -> None:
        """Make the layer refer to `tensor`."""
        self.weights[self.place] = tensor


def second_places(module: nn.Module, key: str) -> list[SecondPlace]:
    """Return further references of `module` to its parameter `key`."""
    if not isinstance(module, nn.RNNBase) or key not in module._flat_weights_names:
        return []
    return [SecondPlace(weakref.ref(module), module._flat_weights_names.index(key))]


def forget_second_places(model: nn.Module) -> None:
    """Let recurrent layers of `model` have no weak references to their weights, with which these could not be moved
    (`take_over`), until `refresh_second_places` is called."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []


def refresh_second_places(model: nn.Module) -> None:
    """Update ``_flat_weights`` of all recurrent layers of `model`, and their weak references, from their parameters."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            weights = [module._parameters.get(name) for name in module._flat_weights_names]
            module._flat_weights[:] = weights
            module._flat_weight_refs = [None if each is None else weakref.ref(each) for each in weights]


Reference = tuple["dict[Any, Any] | list[Any] | CellType", Any, dict[str, Any], str]
"""A reference to a weight from outside its module: the holder (a module's attributes, a container in them, or a hook's
closure), the key there, and the registry and the name of the weight."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that PyTorch's modules have themselves: registered children, parameters, hooks."""


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that PyTorch does not keep: what its own code has put there."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks of a module's forward."""
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def content_of(cell: CellType) -> Any:
    """Return what a variable of a closure holds; None if it is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def references_to_weights(model: nn.Module) -> list[Reference]:
    """Return what refers to the model's weights beside the modules that they belong to."""
    places: dict[int, tuple[dict[str, Any], str]] = {}
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    places.setdefault(id(tensor), (registry, name))
    found: list[Reference] = []
    for module in model.modules():
        own = vars(module)
        holders: list[Any] = [plain_attributes(module)]
        holders += [value for value in holders[0].values() if isinstance(value, (list, dict))]
        for index, holder in enumerate(holders):
            for key, value in enumerate(holder) if isinstance(holder, list) else holder.items():
                if isinstance(value, torch.Tensor) and id(value) in places:
                    found.append((holder if index else own, key, *places[id(value)]))
        for hook in hooks_of(module):
            for cell in getattr(hook, "__closure__", None) or ():
                value = content_of(cell)
                if isinstance(value, torch.Tensor) and id(value) in places:
                    found.append((cell, None, *places[id(value)]))
    return found


def refresh_references(references: Iterable[Reference]) -> None:
    """Have all `references` refer to the weights that their modules have now."""
    for holder, key, registry, name in references:
        if isinstance(holder, CellType):
            holder.cell_contents = registry[name]
        else:
            holder[key] = registry[name]


def parts_with_dtype(model: nn.Module) -> dict[str, tuple[nn.Module, torch.dtype]]:
    """Return the parts of `model`, by name, that the modules around them cast to a dtype of their own in each forward,
    as transformers' routers (Switch Transformers, NLLB-MoE) do with their classifiers."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        dtype = vars(module).get("dtype")
        part = dict(module.named_children()).get("classifier") if isinstance(dtype, torch.dtype) else None
        if isinstance(dtype, torch.dtype) and part is not None:
            found[f"{name}.classifier" if name else "classifier"] = part, dtype
    return found


_CAST = "_bigmodel_cast_in_forward"


def is_cast_in_forward(tensor: torch.Tensor) -> bool:
    """Whether a parameter was put in the place of another by `cast_in_forward`."""
    return hasattr(tensor, _CAST)


def was_written_since_cast(tensor: torch.Tensor, source: torch.Tensor | None) -> bool:
    """Whether a tensor that `cast_in_forward` put in the place of another was written since.

    Args:
        tensor: The tensor.
        source: What it was cast from, if kernels may have written that increase no version counter, as batch norm's.
    """
    if source is None:
        return bool(tensor._version != getattr(tensor, _CAST))
    now, then = tensor.detach().to(HOST), source.detach().to(tensor.dtype)
    return not bool(((now == then) | (now.isnan() & then.isnan())).all())


def cast_in_forward(
    module: nn.Module,
    convert: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
    streamed: Container[tuple[int, str]],
) -> bool:
    """Cast the tensors of `module` and its parts.

    Those that stay there are cast for good, as they are undispatched. In the place of streamed ones come others, until
    their forward has returned.

    Args:
        module: The module.
        convert: Casts a tensor.
        device: Where the calling thread computes with the module.
        streamed: The registries of streamed tensors, by id, with their keys.

    Returns:
        False, and nothing is changed: some are elsewhere, or would be moved.

    Raises:
        DispatchError: Gradients of streamed weights are being computed; nothing is changed.
    """
    held: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (registry, name, value)
        for part in module.modules()
        for registry in (part._parameters, part._buffers)
        for name, value in registry.items()
        if value is not None
    ]
    cast: dict[int, torch.Tensor] = {}
    for registry, name, value in held:
        stays = (id(registry), name) not in streamed and is_accelerator(value.device)
        if not (stays or value.device == device):
            return False
        with torch.inference_mode(False), torch.no_grad():
            converted = cast.setdefault(id(value), convert(value))
        if converted.device != value.device:
            return False
        trains = value.requires_grad and torch.is_grad_enabled()
        if trains and converted is not value and (id(registry), name) in streamed:
            raise DispatchError(
                f"{name!r} of a {type(module).__name__} is cast in a forward and streamed, so that it cannot be "
                "trained: cast it before the model is dispatched, map it to an accelerator, or call "
                "requires_grad_(False) on it"
            )
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        registries = (part._parameters, part._buffers)
        if not any((id(registry), name) in streamed for registry in registries for name in registry):
            type(part)._apply(part, convert, recurse=False)
    for registry, name, value in held:
        if cast[id(value)] is value or registry[name] is not value or value.dtype == cast[id(value)].dtype:
            continue
        stands_in = made.setdefault(id(value), like(value, cast[id(value)]))
        if (id(registry), name) in streamed:
            setattr(stands_in, _CAST, stands_in._version)
        registry[name] = stands_in
    refresh_second_places(module)
    return True
