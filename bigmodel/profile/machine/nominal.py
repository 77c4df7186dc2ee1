"""A machine nobody measured: round figures of a server with a data-centre accelerator.

Good for finding how parts should be arranged on a machine that is not here, for that depends on ratios that differ
little between such machines. Not good for telling seconds, and nothing does so with it.
"""

from __future__ import annotations

from ..trace.work import ATTENTION, MOVE, PRODUCT
from .machine import Curve, DeviceLinks, DeviceSpeed, LinkSpeed, MachineProfile

ROWS = (1.0, 256.0)


def nominal_machine() -> MachineProfile:
    """Return a machine of round figures; its accelerator stands for any CUDA device."""
    link = LinkSpeed(25e9, 10e-6)
    return MachineProfile(
        name="round figures, not measured",
        key="nominal",
        devices={"cpu": _device(2e-10, 2e11, 5e-6), "cuda:0": _device(1e-12, 4e14, 5e-6)},
        links={"cuda:0": DeviceLinks(link, LinkSpeed(12e9, 10e-6), link, LinkSpeed(12e9, 10e-6))},
        memory_rate=1e11,
        disk_cold=5e9,
        disk_warm=2e10,
        python_call=2e-6,
        cache_bytes=2**25,
        memory_bytes=2**39,
    )


def _device(read: float, operations: float, call: float) -> DeviceSpeed:
    """`read`: seconds for each number read; `operations`: per second, two for each number and row."""
    per_row = 2 / operations
    curve = Curve(ROWS, (max(read, per_row), max(read, per_row * ROWS[-1])), grows=True)
    return DeviceSpeed(
        {f"{PRODUCT}:float32": curve, f"{ATTENTION}:float32": curve, MOVE: Curve((1.0,), (read,))}, call, call
    )
