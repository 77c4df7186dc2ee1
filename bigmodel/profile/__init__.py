"""Profile: what a model needs and what a machine gives, before any weight is read."""

from __future__ import annotations

from .context import max_context
from .dry_run import Phase
from .dtypes import CustomDtype, DtypeLike, dtype_byte_size, normalize_dtype
from .experts import expert_names
from .generation import as_when_decoding
from .kv_cache import kv_cache_bytes, layer_cache_bytes
from .model_profile import Profile
from .no_split import UnitModule, find_no_split_classes, find_units
from .optimizers import OPTIMIZERS
from .profiling import profile_model
from .sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
)
from .source import meta_model, model_config, profile_source
from .tensors import TensorSpec, named_tensors, storage_key, tensor_specs
from .ties import find_tied_parameters, retie_parameters
from .trace import Trace
from .training import TrainingMemory, training_memory
from .units import SLAB_ALIGNMENT, UnitProfile, profile_units
from .usage import image_shape, sound_shape
from .workload import Workload

__all__ = [
    "OPTIMIZERS",
    "SLAB_ALIGNMENT",
    "CustomDtype",
    "DtypeLike",
    "Phase",
    "Profile",
    "TensorSpec",
    "Trace",
    "TrainingMemory",
    "UnitModule",
    "UnitProfile",
    "Workload",
    "as_when_decoding",
    "calculate_maximum_sizes",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "dtype_byte_size",
    "expert_names",
    "find_no_split_classes",
    "find_tied_parameters",
    "find_units",
    "get_max_layer_size",
    "image_shape",
    "kv_cache_bytes",
    "layer_cache_bytes",
    "max_context",
    "meta_model",
    "model_config",
    "named_tensors",
    "normalize_dtype",
    "profile_model",
    "profile_source",
    "profile_units",
    "retie_parameters",
    "sound_shape",
    "storage_key",
    "tensor_specs",
    "training_memory",
]
