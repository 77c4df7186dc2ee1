"""Checkpoint: safetensors on disk to tensors and back, in place."""

from __future__ import annotations

from .checkpoint import Checkpoint, load_state_dict
from .conversion import Conversion, Source, convert_keys
from .fusion import Fusion, Piece
from .load import load_checkpoint_in_model, run_dtype
from .mapping import MappedRegion, mapped_region
from .pages import is_untouched, populate, release
from .save import save_model

__all__ = [
    "Checkpoint",
    "Conversion",
    "Fusion",
    "MappedRegion",
    "Piece",
    "Source",
    "convert_keys",
    "is_untouched",
    "load_checkpoint_in_model",
    "load_state_dict",
    "mapped_region",
    "populate",
    "release",
    "run_dtype",
    "save_model",
]
