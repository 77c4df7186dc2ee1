"""The kind of device that accelerate's examples run on."""

from __future__ import annotations

import pytest
import torch

from bigmodel import test_utils


def test_the_kind_of_device_is_one_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.device(test_utils.torch_device).type == test_utils.torch_device
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:0")
    assert test_utils._kind() == "cpu"
