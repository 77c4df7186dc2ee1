"""Profile: what a model needs and what a machine gives, before any weight is read."""

from __future__ import annotations

from .dtypes import CustomDtype, DtypeLike, dtype_byte_size, normalize_dtype
from .no_split import UnitModule, find_no_split_classes, find_units
from .sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
)
from .tensors import TensorSpec, named_tensors, storage_key, tensor_specs
from .ties import find_tied_parameters, retie_parameters
from .units import SLAB_ALIGNMENT, UnitProfile, profile_units

__all__ = [
    "SLAB_ALIGNMENT",
    "CustomDtype",
    "DtypeLike",
    "TensorSpec",
    "UnitModule",
    "UnitProfile",
    "calculate_maximum_sizes",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "dtype_byte_size",
    "find_no_split_classes",
    "find_tied_parameters",
    "find_units",
    "get_max_layer_size",
    "named_tensors",
    "normalize_dtype",
    "profile_units",
    "retie_parameters",
    "storage_key",
    "tensor_specs",
]
