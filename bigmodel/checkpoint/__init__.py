"""Checkpoint: safetensors on disk to tensors and back, in place."""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
