"""A plan as an SVG picture: a bar for each device, its parts and the other uses of its memory as segments."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from pathlib import Path

from ...atomic_files import write_text
from ...devices import format_size
from .plan import DevicePlan, Plan
from .tables import label_of, runs_of

WIDTH, BAR, GAP, LEFT, TOP = 960, 44, 34, 90, 64
PARTS = ("#4e79a7", "#76a5d0")
COLOURS = {
    "buffers": "#9c755f",
    "KV cache": "#f28e2b",
    "activations": "#e15759",
    "workspace": "#edc948",
    "slots": "#59a14f",
    "training": "#b07aa1",
    "unused": "#d7d7d7",
    "free": "#eeeeee",
}

Segment = tuple[str, int, int, str]
"""Label, bytes, bytes that its length stands for (fewer where much of the budget is free), colour."""


def svg(plan: Plan) -> str:
    """Return the picture as SVG text."""
    devices = [device for device in plan.devices.values() if device.total or device.budget]
    longest = max((_length(device) for device in devices), default=1) or 1
    height = TOP + len(devices) * (BAR + GAP) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="16">{_heading(plan)}</text>',
    ]
    for number, device in enumerate(devices):
        lines += _bar(plan, device, TOP + number * (BAR + GAP), (WIDTH - LEFT - 20) / longest)
    lines += _legend(height - 16)
    return "\n".join([*lines, "</svg>"]) + "\n"


def page(plan: Plan) -> str:
    """Return an HTML page with the picture and the tables."""
    title = html.escape(plan.model)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Plan of {title}</title></head><body>\n"
        f"{svg(plan)}<pre>{html.escape(str(plan))}</pre>\n<pre>{html.escape(plan.explain())}</pre></body></html>\n"
    )


def write(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write the picture to `path` atomically and return the path: `page` if its name ends in `.html`, else `svg`."""
    target = Path(path)
    write_text(target, page(plan) if target.suffix == ".html" else svg(plan))
    return target


def _length(device: DevicePlan) -> int:
    """Return the bytes that a device's bar stands for: its budget, at most twice what it holds."""
    if device.budget is None:
        return device.total
    return max(device.total, min(device.budget, 2 * device.total))


def _heading(plan: Plan) -> str:
    text = f"{plan.model}: batch {plan.batch_size}, context {plan.context_length}"
    if plan.prediction is not None:
        text += f", {plan.prediction.token:.3g} s per step, bound by {plan.prediction.binds}"
    return html.escape(text)


def _segments(plan: Plan, device: DevicePlan) -> Iterator[Segment]:
    held = [part for part in plan.parts if part.device == device.device and part.bytes]
    shade, counted = 0, 0
    for run in runs_of(held):
        nbytes = min(sum(part.bytes for part in run), device.weights + device.buffers - counted)
        if nbytes > 0:  # tied parts count once
            yield label_of(run), nbytes, nbytes, PARTS[shade]
            shade, counted = 1 - shade, counted + nbytes
    rest = device.weights + device.buffers - counted
    sizes = (rest, device.kv_cache, device.activations, device.workspace, device.slots, device.training, device.unused)
    for (name, colour), nbytes in zip(COLOURS.items(), sizes, strict=False):
        if nbytes > 0:
            yield name, nbytes, nbytes, colour
    if device.free is not None and device.free > 0:
        yield f"{format_size(device.free)} free", device.free, _length(device) - device.total, COLOURS["free"]


def _bar(plan: Plan, device: DevicePlan, y: int, scale: float) -> Iterator[str]:
    yield f'<text x="16" y="{y + 27}">{html.escape(str(device.device))}</text>'
    x = float(LEFT)
    for label, nbytes, length, colour in _segments(plan, device):
        width = length * scale
        title = html.escape(f"{label}: {format_size(nbytes)}")
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}" stroke="white">'
            f"<title>{title}</title></rect>"
        )
        if width > 7.5 * len(label):
            fill = "#333333" if colour == COLOURS["free"] else "white"
            yield f'<text x="{x + 4:.1f}" y="{y + 27}" fill="{fill}">{html.escape(label)}</text>'
        x += width
    budget = "no limit" if device.budget is None else format_size(device.budget)
    said = f"{format_size(device.total)} of {budget}"
    yield f'<text x="{LEFT}" y="{y + BAR + 16}" fill="#555555" font-size="12">{said}</text>'


def _legend(y: int) -> Iterator[str]:
    x = LEFT
    for name, colour in {"parts": PARTS[0], **COLOURS}.items():
        yield f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{colour}" stroke="#999999"/>'
        yield f'<text x="{x + 18}" y="{y}">{name}</text>'
        x += 40 + 8 * len(name)
