"""Traits of an operation that do not depend on its arguments, looked up once: hashing an operation is slow."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from .kernels import KERNELS
from .roles import GATHERED, Roles, roles_of

aten = torch.ops.aten

_MAY_MIX = {
    aten.copy_.default,
    aten._copy_from.default,
    aten._copy_from_and_resize.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten.set_.source_Tensor,
    aten._pack_padded_sequence.default,
    aten._pack_padded_sequence_backward.default,
}
"""Operations whose arguments may be on different devices, as on real accelerators."""


_COPIES = {
    aten.copy_.default,
    aten._copy_from.default,
    aten._copy_from_and_resize.default,
    aten._to_copy.default,
    aten._local_scalar_dense.default,
}
"""Operations that may copy between the host and an accelerator."""


_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
}
"""Operations that a library computes, which allocates a workspace for each stream."""


_ADDED_PRODUCTS = {aten.addmm.default, aten.baddbmm.default}
"""Those of them whose first argument is added."""


_SETS = {aten.set_.source_Tensor, aten.set_.source_Tensor_storage_offset, aten.set_.source_Storage_storage_offset}
"""Operations that give a tensor the memory of another."""


_HOST_OUTPUTS = {aten._pack_padded_sequence.default: {1}}
"""Outputs that stay on the host, by position."""


_SPARSE_GRADIENTS: dict[OpOverload, int | str] = {
    aten.embedding.default: 4,
    aten._embedding_bag.default: 5,
    aten.gather.default: "sparse_grad",
}
"""Operations with sparse gradients on request, with the position or name of the argument that requests them."""


_AT_LAUNCH = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
}
"""Tags of operations that are computed when they are launched."""


class Traits:
    """Traits of one operation.

    Attributes:
        func: The operation.
        kernel: Computes it on the host.
        may_mix: Whether its arguments may be on different devices.
        copies: Whether it may copy between the host and an accelerator.
        is_product: Whether a library computes it.
        factors: Positions of the two tensors of a product.
        waits: Whether the host waits for it, to know the shape of what it returns; of those that take indices, only if
            these are masks.
        sets: Whether it gives a tensor the memory of another.
        host_outputs: Positions of outputs that stay on the host.
        sparse: Position or name of the argument that asks for sparse gradients; None: there is none.
        is_composite: Whether ATen composes it of others.
        is_decomposed: Whether ATen or Python composes it of others.
        roles: What it does with the memory of its arguments; None: it accesses none.
        gathered: Position of the argument of which it reads some rows; None: there is none.
        is_list: Whether it is one of those on lists of tensors that ATen also does tensor by tensor.
        is_indexed: Whether it takes tensors of indices, or masks, in a list.
        is_queued: Whether strict accelerators may compute it after its launch.
        touches: Whether it accesses memory at all, or changes the metadata of a tensor.
        keeps_metadata: Whether it leaves the shape and strides of what it writes to as they are.
        only_reads: Whether it reads all tensors among its arguments, whole, and writes to none.
        returned: Position of the argument that it writes to and returns; None: it returns new tensors.
        returns: Whether it returns anything.
    """

    __slots__ = (
        "copies",
        "factors",
        "func",
        "gathered",
        "host_outputs",
        "is_composite",
        "is_decomposed",
        "is_indexed",
        "is_list",
        "is_product",
        "is_queued",
        "is_view",
        "keeps_metadata",
        "kernel",
        "may_mix",
        "only_reads",
        "returned",
        "returns",
        "roles",
        "sets",
        "sparse",
        "touches",
        "waits",
    )

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        self.func = func
        self.kernel: Any = KERNELS.get(func, func._op)
        self.may_mix = func in _MAY_MIX
        self.copies = func in _COPIES
        self.is_product = func in _PRODUCTS
        self.factors = (1, 2) if func in _ADDED_PRODUCTS else (0, 1)
        self.waits = torch.Tag.dynamic_output_shape in func.tags
        self.sets = func in _SETS
        self.host_outputs = _HOST_OUTPUTS.get(func, ())
        self.sparse = _SPARSE_GRADIENTS.get(func)
        self.is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), DispatchKey.CompositeImplicitAutograd
        )
        self.is_decomposed = self.is_composite or DispatchKey.CompositeImplicitAutograd in func.py_kernels
        self.is_list = func._schema.name.startswith("aten::_foreach_") and func.has_kernel_for_dispatch_key(
            DispatchKey.CompositeExplicitAutograd
        )
        self.is_view = func.is_view
        self.roles: Roles | None = roles_of(func)
        self.gathered = GATHERED.get(func)
        self.is_indexed = func is aten.index.Tensor
        self.only_reads = self.roles is not None and self.roles.only_reads and self.gathered is None
        self.touches = schema.is_mutable or self.roles is not None
        written = [
            position
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        tags = set(func.tags) - ({torch.Tag.dynamic_output_shape} if self.is_indexed else set())
        self.is_queued = not self.is_view and self.roles is not None and not tags & _AT_LAUNCH
        self.keeps_metadata = False
        if written:
            # In place: one argument, or lists of them. Those with `out=` may resize it, others return new tensors too.
            plain = not any(schema.arguments[position].kwarg_only for position in written)
            one = not schema.returns or (len(written) == 1 and len(schema.returns) == 1)
            self.is_queued = self.is_queued and plain and one
            self.keeps_metadata = plain and _keeps_metadata(func)
        self.returned = written[0] if written and schema.returns else None
        self.returns = bool(schema.returns)


def _keeps_metadata(func: OpOverload) -> bool:
    """Whether an operation that writes to its arguments leaves their shapes and strides as they are."""
    resizes = "resize" in func._schema.name or func is aten.set_data.default
    return func.namespace == "aten" and torch.Tag.inplace_view not in func.tags and not resizes


_known: dict[int, Traits] = {}
"""Traits of the operations that have run, by identity."""


def traits_of(func: OpOverload) -> Traits:
    """Return the traits of `func`."""
    return _known.get(id(func)) or _known.setdefault(id(func), Traits(func))
