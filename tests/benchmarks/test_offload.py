"""Decoding with streamed weights beside the resident model and copies of pinned memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.offload import pinned_copies
from bigmodel.devices import virtual

from .answering import answer, limit, rows


@pytest.mark.slow
def test_a_streamed_model_gives_the_resident_ones_logits(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["offload"], workdir, capsys)
    assert limit(found, "logits that differ")["kept"]
    by_name = {row["variant"]: row for row in rows(found)}
    assert by_name["bigmodel, streamed"]["rate"] == pytest.approx(
        found["settings"]["bytes"] / by_name["bigmodel, streamed"]["step"]
    )
    assert found["settings"]["bytes"] > 0


def test_copies_are_of_as_many_bytes_as_a_step() -> None:
    virtual.enable(count=1)
    before = virtual.link(0).bytes_to_device
    pinned_copies(1000, 300, "virtual:0")()
    assert virtual.link(0).bytes_to_device - before == 1000
