"""`bigmodel probe`: compute throughput and transfer bandwidth of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .model_options import AsJson
from .tables import print_tables

if TYPE_CHECKING:
    from rich.table import Table

    from bigmodel.profile.machine.machine import Curve, MachineProfile


def probe(
    refresh: Annotated[bool, typer.Option(help="Measure again instead of showing stored results.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, or show the stored measurements; plans predict time from them."""
    from bigmodel.profile.machine import machine as machine_json
    from bigmodel.profile.machine.probe import known_machine, machine

    if refresh or known_machine() is None:
        typer.echo("measuring; this takes up to a minute and needs an idle machine", err=True)
    found = machine(refresh)
    if as_json:
        typer.echo(machine_json.dump(found), nl=False)
        return
    print_tables(found.name, devices_table(found), links_table(found))


def devices_table(machine: MachineProfile) -> Table:
    """Return the compute throughput of each device."""
    from rich.table import Table

    drawn = Table()
    for name in ("device", "dtype", "reads weights at", "multiplies at", "a call takes"):
        drawn.add_column(name, justify="left" if name in ("device", "dtype") else "right")
    for device, speed in machine.devices.items():
        for name, curve in speed.curves.items():
            kind, _, dtype = name.partition(":")
            if kind == "product" and ":" not in dtype:
                read, multiplied = _rates(curve, dtype)
                drawn.add_row(device, dtype, read, multiplied, f"{1e6 * speed.call:.1f} µs")
    return drawn


def links_table(machine: MachineProfile) -> Table:
    """Return the bandwidth and latency of each link."""
    from rich.table import Table

    drawn = Table()
    drawn.add_column("from, to")
    drawn.add_column("rate", justify="right")
    drawn.add_column("latency", justify="right")
    drawn.add_row("memory", _rate(machine.memory_rate), "")
    drawn.add_row("disk, cold", _rate(machine.disk_cold), "")
    drawn.add_row("disk, in the kernel's cache", _rate(machine.disk_warm), "")
    for device, links in machine.links.items():
        rows = {
            f"host to {device}, pinned": links.to_device,
            f"host to {device}, pageable": links.to_device_pageable,
            f"{device} to host, pinned": links.to_host,
            f"{device} to host, pageable": links.to_host_pageable,
        }
        for name, link in rows.items() if device != "cpu" else [("memory to memory", links.to_device)]:
            drawn.add_row(name, _rate(link.rate), f"{1e6 * link.latency:.1f} µs")
    return drawn


def _rates(curve: Curve, dtype: str) -> tuple[str, str]:
    """Return bytes per second of a product with one row, and operations per second of one with the most rows."""
    import torch

    size = getattr(torch, dtype).itemsize
    return _rate(size / curve.values[0]), f"{2e-9 * curve.sizes[-1] / curve.values[-1]:.0f} GFLOP/s"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"
