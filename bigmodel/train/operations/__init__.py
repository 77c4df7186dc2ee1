"""Operations on nested tensors, within a process and across processes."""

from bigmodel.train.operations.checks import DistributedOperationException, verify_operation
from bigmodel.train.operations.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    gather_uneven,
    reduce,
)
from bigmodel.train.operations.nested import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    find_tensors,
    honor_type,
    is_namedtuple,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from bigmodel.train.operations.padding import pad_across_processes, pad_input_tensors

__all__ = [
    "DistributedOperationException",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "find_tensors",
    "gather",
    "gather_object",
    "gather_uneven",
    "honor_type",
    "is_namedtuple",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "verify_operation",
]
