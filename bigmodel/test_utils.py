"""Names that accelerate's examples import from ``accelerate.test_utils``: the kind of device that they run on."""

import os

import torch


def _kind() -> str:
    named = os.environ.get("ACCELERATE_TORCH_DEVICE")
    if named:
        return torch.device(named).type  # an unknown one is an error
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


torch_device = _kind()
"""The kind of the first accelerator, "cpu" where there is none; ``ACCELERATE_TORCH_DEVICE`` names another."""
