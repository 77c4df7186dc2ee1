"""Identity of cached keys and values beside their tokens: blocks of another model must not be used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from bigmodel.devices import DeviceLike, torch_device
from bigmodel.server.engine.compute.runner import Runner

if TYPE_CHECKING:
    from bigmodel.sources.local import ModelSource

SAMPLES = 16
SAMPLE_BYTES = 4096
"""Samples of each checkpoint file, spread evenly, and their bytes."""


def checkpoint_digest(source: ModelSource) -> str:
    """A digest of a checkpoint on this machine: its config, and the name, size, time and samples of each file.

    Reading all weights would take minutes. A rewritten file has another time, even with the same bytes.
    """
    found = hashlib.sha256(json.dumps(source.config_dict(), sort_keys=True).encode())
    path = source.fetch_weights()
    folder = path if path.is_dir() else path.parent
    for name in sorted(source.weight_files()):
        with (folder / name).open("rb") as file:
            status = os.fstat(file.fileno())
            found.update(f"{name} {status.st_size} {status.st_mtime_ns}".encode())
            for index in range(SAMPLES):
                file.seek(max(0, status.st_size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def prefix_identity(checkpoint: str, tokenizer: Any, plan: Any, runner: Runner, devices: Iterable[str]) -> str:
    """Everything that decides the bits of keys and values beside the tokens, as text.

    Args:
        checkpoint: As `checkpoint_digest` returns it.
        tokenizer: Of the model; another one gives tokens another meaning.
        plan: Where each part runs, and how weights are quantised for the link.
        runner: The kernels that compute on the host.
        devices: Those that hold keys and values.
    """
    from bigmodel import __version__

    parts = [] if plan is None else [(part.name, _kind(part.runs_on)) for part in plan.parts]
    return json.dumps(
        {
            "versions": [__version__, torch.__version__],
            "checkpoint": checkpoint,
            "vocabulary": hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest(),
            "parts": parts,
            "dtypes": [] if plan is None else [plan.dtype, plan.offload_dtype, plan.host_kernels],
            "devices": {device: _kind(device) for device in devices},
            "host": [torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), runner.host_linear],
            "rows": runner.row_multiple,
        },
        sort_keys=True,
        default=str,
    )


def _kind(device: DeviceLike) -> str:
    """Name of the hardware behind a device: another one may compute other bits."""
    found = torch_device(device)
    return torch.cuda.get_device_name(found) if found.type == "cuda" else found.type
