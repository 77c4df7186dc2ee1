from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from bigmodel.utils import available


def test_a_package_is_available_when_it_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available.is_transformers_available()
    assert available.is_tqdm_available()
    assert not available.is_megatron_lm_available()
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))  # half made: it has no spec
    assert not available.is_wandb_available()


def test_rich_is_used_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.delenv("ACCELERATE_ENABLE_RICH", raising=False)
    assert not available.is_rich_available()
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    assert available.is_rich_available()


def test_devices_are_those_of_pytorch_that_this_library_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert available.is_cuda_available()
    assert not available.is_npu_available()
    assert not available.is_npu_available(check_device=True)
    assert not available.is_hpu_available(init_hccl=True)
    assert not available.is_torch_xla_available(check_is_tpu=True)


@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_depends_on_the_gpu(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert available.is_bf16_available() is supported


def test_bitsandbytes_says_whether_it_computes_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("bitsandbytes")
    library.__spec__ = ModuleSpec("bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    assert not available.is_bitsandbytes_multi_backend_available()
    library.features = {"multi_backend"}
    assert available.is_bitsandbytes_multi_backend_available()


def test_fp8_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not available.is_fp8_available()
    assert available.is_fp16_available()
