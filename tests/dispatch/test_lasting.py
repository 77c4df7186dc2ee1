"""What is made to last knows nothing of the moment in which it was made."""

from __future__ import annotations

import torch

from bigmodel.dispatch.lasting import for_later


def test_neither_inference_mode_nor_a_default_device_counts() -> None:
    with torch.inference_mode(), torch.device("meta"):
        with for_later():
            made = torch.zeros(2)
        assert torch.zeros(2).is_meta, "the caller's are back afterwards"
    assert (str(made.device), made.is_inference()) == ("cpu", False)
    made.add_(1)


def test_a_device_that_is_named_counts() -> None:
    with for_later():
        assert torch.zeros(2, device="meta").is_meta
