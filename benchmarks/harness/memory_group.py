"""A control group of Linux that limits the memory of processes, the pages of files that they read included."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import BenchmarkError

ROOT = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""

INTERPRETER_BYTES = 512 * 2**20
"""Memory that an interpreter takes which has imported torch and transformers."""


@contextmanager
def memory_group(nbytes: int, root: Path = ROOT) -> Iterator[Path]:
    """Make a control group, and remove it at the end, when all its processes must have ended.

    Args:
        nbytes: Limit of the memory of all its processes together.
        root: Where control groups are mounted: version 2, or version 1 with a folder ``memory``.

    Yields:
        The file to which a process writes its id in order to join.

    Raises:
        BenchmarkError: Control groups cannot be made here.
    """
    version_1 = root / "memory"
    mount, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (root, "memory.max")
    folder = mount / f"bigmodel-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        raise _refused(mount, error) from error
    try:
        try:
            with open(folder / limit, "r+") as file:
                file.write(str(nbytes))
        except OSError as error:
            raise _refused(mount, error) from error
        yield folder / "cgroup.procs"
    finally:
        os.rmdir(folder)


def _refused(mount: Path, error: OSError) -> BenchmarkError:
    return BenchmarkError(
        f"memory cannot be limited: {mount} allows no control group with a limit of memory ({error.strerror}); run as "
        "root on Linux with the memory controller enabled, or measure with the files cached alone"
    )
