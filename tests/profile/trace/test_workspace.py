from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.profile.trace.workspace import scratch_bytes

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


def convolution(channels: int, side: int, to: int, span: int, stride: int = 1, dtype: Any = torch.float32) -> int:
    """Return the workspace of a convolution on the host; its data are a megabyte at most."""
    data, weight = torch.zeros(1, channels, side, side, dtype=dtype), torch.zeros(to, channels, span, span, dtype=dtype)
    given = data, weight, None, [stride] * 2, [span // 2] * 2, [1] * 2, False, [0] * 2, 1
    return scratch_bytes(aten.convolution.default, given, aten.convolution.default(*given))


def test_a_convolution_on_the_host_copies_its_input_and_weights() -> None:
    assert convolution(64, 14, 64, 3) == 4 * (64 * 14 * 14 + 64 * 64 * 9)
    assert convolution(64, 14, 64, 3, dtype=torch.bfloat16) == 2 * (64 * 14 * 14 + 64 * 64 * 9)
    assert convolution(64, 14, 128, 1, stride=2) == 4 * (64 * 14 * 14 + 64 * 128)


def test_one_of_few_channels_reads_them_as_they_lie_and_copies_what_it_makes() -> None:
    assert convolution(3, 56, 64, 7, stride=2) == 4 * 64 * 28 * 28


def test_one_that_spans_one_position_copies_nothing() -> None:
    assert convolution(64, 14, 64, 1) == 0


def test_softmax_of_rows_that_may_be_masked_whole_holds_a_byte_for_each_score() -> None:
    scores = torch.zeros(1, 4, 10, 10)
    assert scratch_bytes(aten._safe_softmax.default, (scores, -1), scores) == 400
