from __future__ import annotations

import torch

from bigmodel.profile.kernels import run_fake

aten = torch.ops.aten


def test_grouped_products_have_a_fake_for_every_dtype() -> None:
    tokens, experts = torch.empty(6, 4, device="meta"), torch.empty(3, 4, 5, device="meta")
    assert run_fake(aten._grouped_mm.default, (tokens, experts), {}).shape == (6, 5)


def test_batch_norm_in_inference_makes_no_statistics_except_on_cuda() -> None:
    x, each = torch.empty(2, 3, 4, 4, device="meta"), torch.empty(3, device="meta")
    outputs = run_fake(aten.native_batch_norm.default, (x, each, each, each, each, False, 0.1, 1e-5), {})
    assert [tuple(output.shape) for output in outputs] == [(2, 3, 4, 4), (0,), (0,)]
