from __future__ import annotations

import pytest
import torch

from bigmodel.utils.versions import compare_versions, is_torch_version


def test_versions_are_compared_by_their_numbers() -> None:
    assert is_torch_version(">=", "2.4")
    assert is_torch_version("==", torch.__version__.split("+")[0])
    assert not is_torch_version("<", "2.10") or is_torch_version("<", "2.11")
    assert compare_versions("transformers", ">", "4.9")


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="operation is '~='; it must be one of >, >="):
        compare_versions("torch", "~=", "2")
