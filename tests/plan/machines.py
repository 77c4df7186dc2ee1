"""A machine with set speeds and profiles of small models, shared by the tests of planning."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from bigmodel.profile import Profile, profile_model
from bigmodel.profile.machine.machine import Curve, DeviceLinks, DeviceSpeed, LinkSpeed, MachineProfile

from ..profile.models import tiny_llama


def machine(link: float = 1e8, accelerator: float = 1e-10, host: float = 1e-9, call: float = 1e-7) -> MachineProfile:
    """Return a machine with one virtual accelerator.

    Args:
        link: bytes per second.
        accelerator: its seconds for each number of a matrix.
        host: the same of the host.
        call: seconds of one operation beside that.
    """

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


def computing(seconds: float = 1e-8) -> MachineProfile:
    """Return a machine whose accelerators take twice the time for twice the rows; each number of a matrix takes so many
    seconds. The host is far slower, and links take next to nothing."""
    base = machine(1e13, accelerator=seconds, host=1e3 * seconds, call=1e-9)
    curve = Curve((1.0, 1024.0), (seconds, 1024 * seconds), grows=True)
    curves = {**base.devices["virtual:0"].curves, "product:float32": curve}
    return replace(base, devices={**base.devices, "virtual:0": replace(base.devices["virtual:0"], curves=curves)})


@cache
def llama_profile(
    context_length: int = 32, new_tokens: int | None = None, batch_size: int = 1, **config: int
) -> Profile:
    """Return the profile of a tiny Llama on virtual accelerators; `config` changes its config."""
    return profile_model(
        tiny_llama(**config),
        batch_size=batch_size,
        context_length=context_length,
        new_tokens=new_tokens,
        device_type="virtual",
    )
