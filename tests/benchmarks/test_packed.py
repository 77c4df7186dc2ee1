"""Packed: what crosses the link is what is stored, and the limits are those of the formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.packed import SHARES, WHOLE, bytes_moved, limits, offloaded, quantised
from bigmodel.benchmarks.steps import Decoder
from bigmodel.checkpoint import Checkpoint
from bigmodel.devices import virtual


@pytest.mark.long
@pytest.mark.slow
def test_a_step_moves_the_stored_bytes_of_the_layers(workdir: Path) -> None:
    virtual.enable(count=1)
    folders = quantised("tiny-half", list(SHARES), workdir)
    moved = {}
    for name, folder in folders.items():
        model = offloaded(folder)
        moved[name] = bytes_moved(model, Decoder(model, "virtual:0"))
        saved = Checkpoint.open(folder)
        stored = sum(saved.entry(key).nbytes for key in saved if key.startswith("model.layers."))
        assert stored <= moved[name] <= 1.02 * stored + 64 * len(saved)  # parts are aligned
    assert all(moved[name] <= share * moved[WHOLE] for name, share in SHARES.items())


@pytest.mark.parametrize(
    ("share", "step", "faster", "slots", "grown", "missed"),
    [
        (0.26, 1.04, 3.5, 14, 101, []),
        (0.29, 1.04, 3.5, 14, 101, ["bytes over"]),
        (0.26, 1.06, 3.5, 14, 101, ["step over its transfer"]),
        (0.26, 1.04, 3.3, 14, 101, ["step of bfloat16"]),
        (0.26, 1.04, 3.5, 13, 101, ["experts of mxfp4"]),
        (0.26, 1.04, 3.5, 14, 103, ["resident set"]),
    ],
)
def test_each_mark_has_its_limit(
    share: float, step: float, faster: float, slots: int, grown: int, missed: list[str]
) -> None:
    rows = [["mxfp4", 26, share, 1.0, step]]
    found = limits(rows, faster, {WHOLE: 4, "mxfp4": slots}, {"mxfp4": [100, grown]})
    wrong = [limit.what for limit in found if not limit.kept]
    assert len(wrong) == len(missed)
    assert all(words in what for words, what in zip(missed, wrong, strict=True))
