"""."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from bigmodel.devices import format_size
from bigmodel.plan import Prediction
from bigmodel.plan.result.tables import label_of, runs_of

from .test_plan import PLAN


def test_consecutive_parts_of_one_placement_are_one_row() -> None:
    assert [label_of(run) for run in runs_of(PLAN.parts)] == [
        "embed", "layers.0 … 1 (2)", "layers.2", "layers.3",
    ]  # fmt: skip


def test_the_text_lists_parts_devices_and_bytes() -> None:
    text = str(PLAN)
    for expected in ("Tiny", "layers.0 … 1 (2)", "streamed from disk", "KV cache", "69 B", "100 B", "no limit"):
        assert expected in text
    assert "\x1b" not in text


def test_the_table_shows_the_free_memory_and_the_budget_of_each_device() -> None:
    lines = [line.split("│") for line in str(PLAN).splitlines() if "│" in line]
    free = {cells[1].strip(): cells[-2].strip() for cells in lines if cells[1].strip() in map(str, PLAN.devices)}
    expected = {str(key): "-" if use.free is None else format_size(use.free) for key, use in PLAN.devices.items()}
    assert free == expected


def test_time_and_notes_are_shown_when_known() -> None:
    timed = dataclasses.replace(PLAN, prediction=Prediction(2.0, 0.5, "the link to 0"), notes=("mind the gap",))
    assert "0.5 s per step (2 per second); bound by the link to 0" in str(timed)
    assert "mind the gap" in str(timed)


def test_a_console_can_print_the_table() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(PLAN.to_table())
    assert "layers.3" in console.export_text()


def test_every_part_and_device_has_its_sentence() -> None:
    lines = PLAN.explain().splitlines()
    assert "layers.2: streamed from RAM." in lines
    assert any(line.startswith("Device 0 holds 10 B weights") and "31 B of its budget" in line for line in lines)


def test_the_explanation_includes_time_and_seconds_saved_by_more_memory() -> None:
    timed = dataclasses.replace(PLAN, prediction=Prediction(None, 0.5, "the link to 0", {0: 0.125}))
    assert "A step takes 0.5 s, bound by the link to 0." in timed.explain()
    assert "One more GiB on device 0 would take 0.125 s off a step." in timed.explain()
