from __future__ import annotations

import pytest
import torch

from bigmodel.profile.kernels import run_fake, scratch_bytes

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize(
    ("rows", "keys", "dtype", "each_thread"),
    [
        (1, 40, torch.float32, 4 * 1 * (40 + 2 + 64)),
        (128, 128, torch.float32, 4 * 32 * (128 + 2 + 64)),
        (1024, 1024, torch.float32, 4 * 256 * (512 + 2 + 64)),
        (1024, 1024, torch.bfloat16, 4 * 256 * (512 + 2 + 64) + 2 * 256 * 512),
    ],
)
def test_flash_attention_on_the_host_holds_a_block_of_scores_for_each_thread(
    rows: int, keys: int, dtype: torch.dtype, each_thread: int
) -> None:
    query, key = (torch.empty(1, 4, length, 64, dtype=dtype, device="meta") for length in (rows, keys))
    assert scratch_bytes(FLASH, (query, key, key), query) == torch.get_num_threads() * each_thread


def test_other_kernels_are_taken_to_hold_nothing() -> None:
    x = torch.ones(4, 4)
    assert scratch_bytes(aten.mm.default, (x, x), x @ x) == 0


def test_grouped_products_have_a_fake_for_every_dtype() -> None:
    tokens, experts = torch.empty(6, 4, device="meta"), torch.empty(3, 4, 5, device="meta")
    assert run_fake(aten._grouped_mm.default, (tokens, experts), {}).shape == (6, 5)


def test_batch_norm_in_inference_makes_no_statistics_except_on_cuda() -> None:
    x, each = torch.empty(2, 3, 4, 4, device="meta"), torch.empty(3, device="meta")
    outputs = run_fake(aten.native_batch_norm.default, (x, each, each, each, each, False, 0.1, 1e-5), {})
    assert [tuple(output.shape) for output in outputs] == [(2, 3, 4, 4), (0,), (0,)]
