"""Operations on fake tensors: PyTorch's fake kernels with corrections, and their results remembered.

`run_fake` corrects fake kernels that refuse valid inputs or differ from the real ones.

A dry run calls thousands of operations, most of them again and again with the same shapes: in each layer, in prefill
and decode, in every plan of the process. PyTorch's own cache of results takes most of a dry run's time, since it
supports symbolic shapes and checks each hit. What is remembered here are results of strided shapes that are known:
shape, strides and dtype of new tensors, of views which argument they view, and of operations in place which argument
they return. All else is derived by PyTorch, and so is every result of `derive`, which the tests hold the remembered
ones against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...devices import HOST
from ...devices.nested import spanned_elements
from ...quantized.formats.restoring import RESTORE
from .shape_rules import RULES, Result, is_plain
from .work import tensors_in

aten = torch.ops.aten

_ON_META = torch.device("meta")

MOST = 50_000
"""Results remembered at most; beyond, all are forgotten."""

_DERIVED_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
)
"""Tags of operations whose results are derived each time."""

_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
"""Types of arguments that are compared by value."""


_ATTRIBUTES = "_bigmodel_attributes"
"""Attribute of a mode that holds the attributes of its new fake tensors, by device."""

_Results = tuple[type | None, tuple[Result, ...]]
"""The results of an operation, and the type of the sequence that they are returned in; None: a single tensor."""

_remembered: dict[tuple[Any, ...], _Results | None] = {}
"""Results by operation and arguments; None: they are derived each time."""


def run_fake(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], read: list[torch.Tensor] | None = None
) -> Any:
    """Run an operation on fake tensors, also where PyTorch's fake kernel refuses what the real one accepts.

    Args:
        func: the operation.
        args: its positional arguments.
        kwargs: its keyword arguments.
        read: the tensors among these, in order; None: they are looked for.
    """
    if func is RESTORE:
        return None
    if _is_always_derived(func) and not _follows_from_shapes(func, args, kwargs):
        return derive(func, args, kwargs)
    key = _key_of(func, args, kwargs)
    if key is None:
        return derive(func, args, kwargs)
    found = _remembered.get(key)
    if found is not None:
        return _make(found, tensors_in(args, kwargs) if read is None else read)
    output = derive(func, args, kwargs)
    if key not in _remembered:
        if len(_remembered) >= MOST:
            _remembered.clear()
        resized = func._schema.is_mutable and _key_of(func, args, kwargs) != key  # as `out` may be
        _remembered[key] = None if resized else _results_of(output, tensors_in(args, kwargs))
    return output


def fake_mode() -> FakeTensorMode:
    """Return a mode that does not remember results, as `run_fake` does."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def forget_results() -> None:
    """Forget the results that are remembered."""
    _remembered.clear()


def derive(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation by the rule for its shapes, if it has one that covers its arguments; else as `by_pytorch`."""
    rule = None if kwargs else RULES.get(func)
    found = None if rule is None else rule(args)
    if found is not None:
        arguments = tensors_in(args)
        if _common_device(arguments) is not None:
            return _make_one(found, arguments, _mode_of(arguments))
    if func is aten.empty.memory_format:
        made = _empty(*args, **kwargs)
        if made is not None:
            return made
    return by_pytorch(func, args, kwargs)


def _empty(
    size: list[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **how: Any
) -> torch.Tensor | None:
    """Return a new contiguous tensor; None if it is to be made in another way, or its device is the current one."""
    if device is None or device.type == "meta" or (device.index is None and device.type != HOST):
        return None
    if how.get("layout") not in (None, torch.strided) or how.get("memory_format") is not None or how.get("pin_memory"):
        return None
    if not all(type(each) is int and each >= 0 for each in size):
        return None
    own = torch.device(device.type, device.index)
    return new_fake(torch.Size(size), dtype or torch.get_default_dtype(), own, _mode_of([]))


def by_pytorch(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation by PyTorch's fake kernel, or by a correction of it."""
    if func is aten._grouped_mm.default:
        return _grouped_mm(*args, **kwargs)
    if func is aten._nested_tensor_from_mask_left_aligned.default:
        return False  # padded batches of nn.TransformerEncoder stay dense, which takes at least as much
    if func in _RECURRENT:
        return _RECURRENT[func](*args)
    if "device" not in kwargs and (func in _META or (func in _VIEWS and is_plain(args[0]))):
        device = _common_device(tensors_in(args, kwargs))
        if device is not None:
            with suppress(IndexError, RuntimeError):  # what PyTorch raises instead comes from below
                return _by_meta_kernel(func, args, kwargs, device)
    output = func(*args, **kwargs)
    if func is aten.native_batch_norm.default and not args[5] and args[0].device.type != "cuda":
        # In inference only CUDA's kernel allocates the batch's statistics.
        return output[0], *(statistic.new_empty(0) for statistic in output[1:])
    return output


def _grouped_mm(
    tokens: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor | None = None, *_: Any, **kwargs: Any
) -> torch.Tensor:
    """The fake kernel takes bfloat16 only; the CPU's takes every floating point dtype."""
    dtype = kwargs.get("out_dtype") or tokens.dtype
    if tokens.dim() == 2 and weights.dim() == 2:
        assert offsets is not None
        return _empty_like((offsets.shape[0], tokens.shape[0], weights.shape[1]), dtype, tokens)
    return _empty_like((*tokens.shape[:-1], weights.shape[-1]), dtype, tokens)


def _empty_like(shape: tuple[int, ...], dtype: torch.dtype, other: torch.Tensor) -> torch.Tensor:
    """Return a new contiguous tensor on the device of another."""
    if not isinstance(other, FakeTensor):
        return other.new_empty(shape, dtype=dtype)
    own = torch.device(other.fake_device.type, other.fake_device.index)
    return new_fake(torch.Size(shape), dtype, own, other.fake_mode)


def _gru_cell(_input: torch.Tensor, _gates: torch.Tensor, state: torch.Tensor, *_: Any) -> Any:
    """PyTorch has no fake kernel of it: the next state, and what the backward needs."""
    return torch.empty_like(state), state.new_empty((state.shape[0], 5 * state.shape[1]))


def _lstm_cell(gates: torch.Tensor, _gates: torch.Tensor, cell: torch.Tensor, *_: Any) -> Any:
    """The fake kernel refuses layers without bias: the next state and cell, and the gates."""
    return torch.empty_like(cell), torch.empty_like(cell), torch.empty_like(gates)


_RECURRENT: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
}


_META_IN_PLACE = frozenset(
    {
        aten.bitwise_and_.Scalar,
        aten.bitwise_left_shift_.Tensor_Scalar,
        aten.bitwise_or_.Tensor,
        aten.copy_.default,
        aten.div_.Tensor,
        aten.mul_.Tensor,
        aten.sub_.Tensor,
    }
)

_META = frozenset(
    {
        aten._to_copy.default,
        aten.add.Tensor,
        aten.bitwise_and.Tensor,
        aten.bitwise_not.default,
        aten.bmm.default,
        aten.cat.default,
        aten.clone.default,
        aten.cos.default,
        aten.cumsum.default,
        aten.div.Tensor,
        aten.expand.default,
        aten.floor_divide.default,
        aten.gather.default,
        aten.le.Tensor,
        aten.masked_fill.Scalar,
        aten.mean.dim,
        aten.mm.default,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.new_empty.default,
        aten.new_ones.default,
        aten.new_zeros.default,
        aten.permute.default,
        aten.pow.Tensor_Scalar,
        aten.rsqrt.default,
        aten.select.int,
        aten.sigmoid.default,
        aten.silu.default,
        aten.sin.default,
        aten.slice.Tensor,
        aten.sort.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.sub.Tensor,
        aten.sum.dim_IntList,
        aten.t.default,
        aten.topk.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.dtype,
        aten.where.self,
        aten.zeros_like.default,
        *_META_IN_PLACE,
    }
)
"""Operations whose fake kernels are those for meta tensors: PyTorch's way to them, through its cache of results, takes
up to a millisecond."""


_VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Operations of which the same holds for tensors with the strides of their shape."""


def _common_device(tensors: list[torch.Tensor]) -> torch.device | None:
    """Return the device of fake tensors that are all on one, and plain; else None."""
    device: torch.device | None = None
    for tensor in tensors:
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return None
        if tensor.constant is not None or tensor.is_conj() or tensor.is_neg():
            return None
        if device is not None and tensor.fake_device != device:
            return None
        device = tensor.fake_device
    return device


def _by_meta_kernel(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> Any:
    """Run an operation of `_META` on fake tensors of one device by the kernel for meta tensors."""
    mode = _mode_of(tensors_in(args, kwargs))
    with in_kernel_invocation_manager(mode):
        output = func(*args, **kwargs)
    if func in _META_IN_PLACE:
        return args[0]
    own = torch.device(device.type, device.index)
    if isinstance(output, (list, tuple)):
        return type(output)(_as_fake(tensor, mode, own) for tensor in output)
    return _as_fake(output, mode, own)


@cache
def _is_always_derived(func: Any) -> bool:
    """Whether the results of an operation do not follow from its arguments' shapes, or are its arguments."""
    return func.namespace != "aten" or any(tag in func.tags for tag in _DERIVED_TAGS)


def _follows_from_shapes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the results of such an operation follow from its arguments' shapes this time: nothing is selected by a
    mask, or dropped out."""
    if func is aten.index.Tensor:
        return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])
    drops = args[3] if len(args) > 3 else kwargs.get("dropout_p")
    return func is aten._scaled_dot_product_flash_attention_for_cpu.default and not drops


def _key_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what the results of an operation follow from; None if that is not known."""
    key: list[Any] = [func, torch.get_default_dtype()]
    if not _extend(key, args):
        return None
    for name, value in kwargs.items():
        if name == "device" and value is not None and value.index is None and value.type != HOST:
            return None  # it is the accelerator that is current
        key.append(name)
        if not _extend(key, (value,)):
            return None
    return tuple(key)


def _extend(key: list[Any], values: Any) -> bool:
    """Add arguments to `key`; return False for one whose shape or value is not known."""
    for value in values:
        kind = type(value)
        if isinstance(value, FakeTensor):
            if value.layout is not torch.strided or value.is_conj() or value.is_neg():
                return False
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
        elif kind in _PLAIN:
            key += (kind, value)  # 1, 1.0 and True are equal, and give other dtypes
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _extend(key, value):
                return False
        else:
            return False
    return True


def _results_of(output: Any, arguments: list[torch.Tensor]) -> _Results | None:
    """Return what `output` is, to be made again; None if it has to be derived each time."""
    kind = type(output) if type(output) in (tuple, list) else None
    ids = [id(tensor) for tensor in arguments]
    tensors = output if kind is not None else (output,)
    storages = [tensor.untyped_storage()._cdata for tensor in arguments]
    results, own = [], set()
    for tensor in tensors:
        known = isinstance(tensor, FakeTensor) and tensor.constant is None and tensor.layout is torch.strided
        if not known or tensor.is_conj() or tensor.is_neg():
            return None
        if id(tensor) in ids:
            results.append(Result((), (), 0, tensor.dtype, tensor.fake_device, ids.index(id(tensor)), True))
            continue
        storage = tensor.untyped_storage()
        viewed = storages.index(storage._cdata) if storage._cdata in storages else None
        if viewed is None:
            has_all = storage.nbytes() == spanned_elements(tensor) * tensor.element_size()
            if storage._cdata in own or not has_all or tensor.storage_offset():
                return None
            own.add(storage._cdata)
        elif tensor.dtype != arguments[viewed].dtype:
            return None
        device = torch.device(tensor.device.type, tensor.device.index)
        place = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        results.append(Result(*place, tensor.dtype, device, viewed))
    return kind, tuple(results)


def _make(found: _Results, arguments: list[torch.Tensor]) -> Any:
    kind, results = found
    mode = _mode_of(arguments)
    if kind is None:
        return _make_one(results[0], arguments, mode)
    return kind([_make_one(result, arguments, mode) for result in results])


def _mode_of(arguments: list[torch.Tensor]) -> FakeTensorMode:
    """Return the mode that the results of an operation on these arguments belong to."""
    for tensor in arguments:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode))


def _make_one(result: Result, arguments: list[torch.Tensor], mode: FakeTensorMode) -> torch.Tensor:
    if result.returned and result.viewed is not None:
        return arguments[result.viewed]
    if result.viewed is not None:
        memory = arguments[result.viewed].untyped_storage()
        where = result.shape, result.strides, result.offset
        return fake_view(memory, where, result.dtype, result.device, mode)
    with torch._C._DisableTorchDispatch():
        tensor = torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=_ON_META)
    return _as_fake(tensor, mode, result.device)


def fake_view(
    memory: torch.UntypedStorage,
    where: tuple[tuple[int, ...], tuple[int, ...], int],
    dtype: torch.dtype,
    device: torch.device,
    mode: FakeTensorMode,
) -> FakeTensor:
    """Return a fake tensor of the mode in the memory of others.

    Args:
        memory: a storage on meta.
        where: shape, strides, and offset in it, in elements.
        dtype: its dtype.
        device: the device that it reports.
        mode: its mode.
    """
    with torch._C._DisableTorchDispatch():
        tensor = torch.empty(0, dtype=dtype, device=_ON_META)
        tensor.set_(memory, where[2], where[0], where[1])
    return _as_fake(tensor, mode, device)


def new_fake(shape: torch.Size, dtype: torch.dtype, device: torch.device, mode: FakeTensorMode) -> FakeTensor:
    """Return a contiguous fake tensor of the mode."""
    with torch._C._DisableTorchDispatch():
        tensor = torch.empty(shape, dtype=dtype, device="meta")
    return _as_fake(tensor, mode, device)


def _as_fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    attributes = _attributes(mode, device)
    made = torch.Tensor._make_subclass(FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device)
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    made.__dict__.update(attributes)
    return made


def _attributes(mode: FakeTensorMode, device: torch.device) -> dict[str, Any]:
    """Return the attributes of a new fake tensor: setting each, as its constructor does, takes as long as all else."""
    known = vars(mode).setdefault(_ATTRIBUTES, {})
    found: dict[str, Any] | None = known.get(device)
    if found is None:
        with torch._C._DisableTorchDispatch():
            found = known[device] = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), device)))
    return found
