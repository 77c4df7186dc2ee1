"""Measurement of this machine: the profile is cached in a file, and concurrent processes share one measurement."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from filelock import FileLock

from ...atomic_files import write_text
from ...devices import HOST, accelerators, torch_device, virtual
from ...devices.cgroup import usable_cores
from ...devices.memory import CachingMemory, physical_bytes
from ...errors import PlanError
from . import machine as machine_json
from .machine import DeviceLinks, DeviceSpeed, MachineProfile
from .probe_compute import probe_device
from .probe_experts import expert_overhead
from .probe_memory import measured_caching
from .probe_transfer import disk_speed, memory_rate, probe_links
from .timing import Effort

logger = logging.getLogger(__name__)

MOST_OTHERS = 0.1
"""Share of the cores that other programs may use while the machine is measured: beyond, figures are taken as off."""


def cache_folder() -> Path:
    """Return the folder of cached machine profiles: under ``XDG_CACHE_HOME``, else ``~/.cache``."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "bigmodel" / "machines"


def machine(refresh: bool = False, effort: Effort | None = None, folder: Path | None = None) -> MachineProfile:
    """Return the profile of this machine, and measure it if it is not cached.

    A measurement takes half a minute. Concurrent callers in other processes wait for it and read its result.

    Args:
        refresh: measure again, unless another process does so meanwhile.
        effort: sizes and repetitions; None: those that predictions need.
        folder: folder of the profiles; None: `cache_folder()`.
    """
    effort = effort or Effort()
    key = machine_key(effort)
    folder = folder or cache_folder()
    path = folder / f"{key}.json"
    started = time.time()
    known = None if refresh else _known(path)
    if known is not None:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{key}.lock"):
        known = _known(path)
        if known is not None and (not refresh or known.measured_at >= started):
            return known
        measured = measure(effort, folder, key)
        write_text(path, machine_json.dump(measured))
    _warn_of_others(path, measured.others)
    return measured


def known_machine(folder: Path | None = None) -> MachineProfile | None:
    """Return the profile of this machine if it was measured before; None otherwise."""
    return _known((folder or cache_folder()) / f"{machine_key(Effort())}.json")


def measure(effort: Effort, folder: Path, key: str = "") -> MachineProfile:
    """Measure this machine: the host, every accelerator, their links, and the disk under `folder`."""
    names = accelerators()
    before = _Usage.now()
    devices: dict[str, DeviceSpeed] = {}
    links: dict[str, DeviceLinks] = {}
    caching: dict[str, CachingMemory] = {}
    for name in [HOST, *names]:
        logger.info("measuring %s", name)
        twin = next((known for known in devices if _same(known, name)), None)
        peer = _peer_of(name, names)
        with _unlimited(torch_device(name)), _unlimited(peer):
            devices[name] = devices[twin] if twin else probe_device(torch_device(name), effort)
            links[name] = probe_links(torch_device(name), effort, peer)
            memory = None if name == HOST else measured_caching(torch_device(name))
            if memory is not None:
                caching[name] = memory
    logger.info("measuring memory and disk")
    readers, cold, warm = disk_speed(folder, effort, usable_cores())
    return MachineProfile(
        name=describe(),
        key=key,
        devices=devices,
        links=links,
        memory_rate=memory_rate(effort),
        disk_cold=cold,
        disk_warm=warm,
        readers=readers,
        expert_overhead=expert_overhead(effort),
        caching=caching,
        cache_bytes=last_cache_bytes(),
        memory_bytes=physical_bytes(),
        measured_at=time.time(),
        others=_Usage.now().of_others_since(before),
    )


class _Usage(NamedTuple):
    """How much of this machine's cores was used up to a moment.

    Attributes:
        moment: seconds of a clock.
        all: core-seconds that all programs used, the hypervisor's other machines among them.
        own: core-seconds that this process used.
    """

    moment: float
    all: float
    own: float

    @classmethod
    def now(cls) -> _Usage:
        times, own = psutil.cpu_times(), psutil.Process().cpu_times()
        busy = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "steal"))
        return cls(time.monotonic(), busy, own.user + own.system)

    def of_others_since(self, before: _Usage) -> float:
        """Return the share of the cores that other programs used since `before`."""
        others = (self.all - before.all) - (self.own - before.own)
        there = (self.moment - before.moment) * (os.cpu_count() or 1)
        return min(max(others / max(there, 1e-9), 0.0), 1.0)


@contextmanager
def _unlimited(device: torch.device | None) -> Iterator[None]:
    """Remove the capacity limit of a virtual accelerator within the context; restore it and the peak afterwards."""
    if device is None or device.type != virtual.TYPE:
        yield
        return
    arena = virtual.board.arena(device.index)
    capacity, peak = arena.capacity, arena.peak
    arena.capacity = None
    try:
        yield
    finally:
        arena.capacity, arena.peak = capacity, peak


def describe() -> str:
    """Return a description of this machine: processor, cores, threads in use, memory, accelerators."""
    parts = [processor_name(), f"{usable_cores()} cores", f"{torch.get_num_threads()} threads"]
    parts.append(f"{round(physical_bytes() / 2**30)} GiB of memory")
    return ", ".join([*parts, *_accelerator_names(accelerators())])


def machine_key(effort: Effort) -> str:
    """Return a hash of everything that the figures depend on."""
    parts = [describe(), platform.platform(), torch.__version__, repr(effort)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _peer_of(name: str, names: Sequence[str]) -> torch.device | None:
    """Return another accelerator of the kind of `name`; None if there is none."""
    return next((torch_device(other) for other in names if other != name and _same(other, name)), None)


def _accelerator_names(names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        device = torch_device(name)
        if device.type == virtual.TYPE:
            link = virtual.link(device.index)
            found.append(f"{name} at {link.bandwidth or 0:.0f} B/s and {link.latency or 0:g} s")
        elif device.type == "cuda":
            found.append(f"{name} {torch.cuda.get_device_name(device)}")
        else:
            found.append(name)
    return found


def _same(one: str, other: str) -> bool:
    """Whether two accelerators are of the same model, so that one measurement is enough."""
    first, second = torch_device(one), torch_device(other)
    if first.type != second.type or first.type == HOST:
        return False
    if first.type != "cuda":
        return True
    return torch.cuda.get_device_name(first) == torch.cuda.get_device_name(second)


def _known(path: Path) -> MachineProfile | None:
    try:
        found = machine_json.load(path.read_text())
    except FileNotFoundError:
        return None
    except PlanError as error:
        _warn_of_ignored(path, str(error))
        return None
    _warn_of_others(path, found.others)
    return found


@cache
def _warn_of_ignored(path: Path, reason: str) -> None:
    """Say once why a profile is not used."""
    logger.warning("%s is ignored: %s. `bigmodel probe` measures the machine again", path, reason)


@cache
def _warn_of_others(path: Path, share: float) -> None:
    """Say once, if it is so, that a profile was measured on a busy machine."""
    if share > MOST_OTHERS:
        logger.warning(
            "%s was measured while other programs used %.0f %% of the processor's cores: predicted seconds may be off. "
            "`bigmodel probe --refresh` measures again; run it on an idle machine",
            path,
            100 * share,
        )


def processor_name() -> str:
    """Return the processor's name as the system reports it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def last_cache_bytes() -> int:
    """Return the bytes of the processor's last-level cache; 8 MiB if the system does not report it."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    if not sizes:
        return 8 * 2**20
    text = sizes[-1].read_text().strip()
    return int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1], 1)
