"""Files of training checkpoints."""

from bigmodel.atomic_files import sync_folder, written_atomically
from bigmodel.train.files.objects import load_object, numbered, save_object
from bigmodel.train.files.weights import load_into, load_weights, save_weights, write_safetensors

__all__ = [
    "load_into",
    "load_object",
    "load_weights",
    "numbered",
    "save_object",
    "save_weights",
    "sync_folder",
    "write_safetensors",
    "written_atomically",
]
