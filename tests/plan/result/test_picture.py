from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bigmodel.devices import format_size
from bigmodel.plan import Plan, make_plan

from ...profile.models import tiny_llama

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def plan(accelerators: None) -> Plan:
    return make_plan(tiny_llama(num_hidden_layers=12), {0: "1500kB", "cpu": "100MB"}, context_length=32)


@pytest.mark.slow
def test_the_bar_of_a_device_is_as_long_as_its_bytes(plan: Plan, tmp_path: Path) -> None:
    tree = ElementTree.parse(plan.plot(tmp_path / "plan.svg"))
    titles = [title.text or "" for title in tree.iter(f"{SVG}title")]
    assert any("model.layers" in title for title in titles)
    assert any(title.startswith("slots: ") for title in titles)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.svg"]
    bars: dict[float, float] = {}
    for segment in tree.iter(f"{SVG}rect"):
        if segment.find(f"{SVG}title") is not None:
            bars[float(segment.attrib["y"])] = bars.get(float(segment.attrib["y"]), 0) + float(segment.attrib["width"])
    lengths = [max(d.total, min(d.budget or 0, 2 * d.total)) for d in plan.devices.values() if d.total]
    drawn = list(bars.values())
    assert drawn[1] / drawn[0] == pytest.approx(lengths[1] / lengths[0], rel=0.01)


@pytest.mark.slow
def test_free_memory_is_labelled_with_its_bytes_if_its_bar_is_shortened(plan: Plan, tmp_path: Path) -> None:
    tree = ElementTree.parse(plan.plot(tmp_path / "plan.svg"))
    titles = {title.text or "" for title in tree.iter(f"{SVG}title")}
    host = plan.devices["cpu"]
    assert host.budget == 10**8
    assert host.free is not None
    assert host.free > host.total
    assert f"{format_size(host.free)} free: {format_size(host.free)}" in titles


@pytest.mark.slow
def test_the_page_has_the_picture_the_tables_and_the_reasons(plan: Plan) -> None:
    page = plan.to_html()
    assert "<svg" in page
    assert "runs on" in page
    assert "Device 0 holds" in page
