"""A machine of round figures with virtual accelerators, for tests that must not depend on this one."""

from __future__ import annotations

from bigmodel.profile.machine.machine import Curve, DeviceLinks, DeviceSpeed, LinkSpeed, MachineProfile


def machine(link: float = 1e8, accelerator: float = 1e-10, host: float = 1e-9, call: float = 1e-7) -> MachineProfile:
    """`link`: bytes per second; `accelerator`, `host`: seconds for each number of a matrix."""

    def device(seconds: float) -> DeviceSpeed:
        curve = Curve((1.0, 64.0), (seconds, 4 * seconds), grows=True)
        return DeviceSpeed({"product:float32": curve, "move": Curve((1.0,), (seconds / 4,))}, call, call)

    both = LinkSpeed(link, 1e-6)
    return MachineProfile(
        name="round figures",
        key="test",
        devices={"cpu": device(host), "virtual:0": device(accelerator)},
        links={"virtual:0": DeviceLinks(both, both, both, both)},
        memory_rate=1e10,
        disk_cold=1e7,
        disk_warm=1e9,
        memory_bytes=2**36,
    )
