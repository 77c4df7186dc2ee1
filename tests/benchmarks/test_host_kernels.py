"""Products with packed weights on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.host_kernels import PACKED, VARIANTS

from .answering import answer, limit, rows


def test_every_kernel_is_held_against_memory_speed(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["host_kernels"], workdir, capsys)
    assert {row["weights"] for row in rows(found)} == set(VARIANTS)
    shares = {row["weights"]: row["share of memory speed"] for row in rows(found)}
    assert limit(found, "over memory speed")["measured"] == max(shares[name] for name in PACKED)


def test_packed_weights_take_the_bytes_of_their_format() -> None:
    nbytes = {name: make(256, 128, 3)[0] / (256 * 128 * 3) for name, make in VARIANTS.items()}
    assert nbytes["float32"] == 4
    assert nbytes["bfloat16"] == 2
    assert nbytes["int8, _weight_int8pack_mm"] == pytest.approx(1, rel=0.01)
    assert nbytes["int4 in groups of 32, _weight_int4pack_mm_for_cpu"] == 0.5 + 4 / 32
    assert nbytes["int8, restored"] == pytest.approx(1, rel=0.01)
    assert nbytes["int4 in groups of 32, restored"] == pytest.approx(0.5 + 2 / 32, rel=0.01)
    assert nbytes["mxfp4, restored"] == 0.5 + 1 / 32
