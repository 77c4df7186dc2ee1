"""Raw readers, which measure the bandwidth of the disk. The best of them in the same rounds is called "raw".

No single reader is the fastest everywhere: direct reads are on one disk, the page cache's read-ahead on another.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .errors import BenchmarkError
from .pagecache import address_of, c_library

MIB = 2**20
_MADV_POPULATE_READ = 22

Reader = Callable[[Sequence[Path]], int]
"""Reads files whole and returns how many bytes that were."""


def direct(files: Sequence[Path]) -> int:
    """Read with O_DIRECT, past the page cache: four threads, 1 MiB at a time, into reused buffers."""
    return _in_threads(files, threads=4, step=MIB, flags=os.O_DIRECT)


def buffered_one(files: Sequence[Path]) -> int:
    """Read through the page cache: one thread, 8 MiB at a time."""
    return _in_threads(files, threads=1, step=8 * MIB, flags=0)


def buffered_two(files: Sequence[Path]) -> int:
    """Read through the page cache: two threads, 8 MiB each."""
    return _in_threads(files, threads=2, step=8 * MIB, flags=0)


def populate(files: Sequence[Path]) -> int:
    """Map the files and have the kernel read their pages, 8 MiB at a time, without copies."""
    total = 0
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as source, mmap.mmap(source.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ) as view:
            begin = address_of(view, size)
            for offset in range(0, size, 8 * MIB):
                populate_pages(begin + offset, min(8 * MIB, size - offset))
        total += size
    return total


def populate_pages(address: int, nbytes: int) -> None:
    """Have the kernel read the pages of a mapping. `address` is that of a page.

    Raises:
        BenchmarkError: this kernel cannot.
    """
    if c_library().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_READ):
        raise BenchmarkError("this kernel has no MADV_POPULATE_READ (it came with Linux 5.14)")


POPULATE = "raw: MADV_POPULATE_READ, 8 MiB"

READERS: dict[str, Reader] = {
    "raw: O_DIRECT, 4 x 1 MiB": direct,
    POPULATE: populate,
    "raw: buffered 8 MiB, 1 thread": buffered_one,
    "raw: buffered 8 MiB, 2 threads": buffered_two,
}


def read_beside(compute: Callable[[], object], name: str, files: Sequence[Path]) -> int:
    """Read files with the reader `name` while `compute` runs concurrently and independently.

    It is the upper bound for programs that compute with what they read, since both share the processor.

    Returns:
        Bytes that were read.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="raw reader") as pool:
        reading = pool.submit(READERS[name], files)
        compute()
        return reading.result()


def _in_threads(files: Sequence[Path], threads: int, step: int, flags: int) -> int:
    """Read all chunks of all files; each thread takes the next one."""
    descriptors: dict[Path, int] = {}
    chunks = _chunks(files, step)
    lock = threading.Lock()
    totals: list[int] = []
    errors: list[BaseException] = []

    def work() -> None:
        total = 0
        try:
            with mmap.mmap(-1, step) as buffer:
                while True:
                    with lock:
                        chunk = next(chunks, None)
                    if chunk is None:
                        break
                    total += os.preadv(descriptors[chunk[0]], [buffer], chunk[1])
        except BaseException as error:
            errors.append(error)
        totals.append(total)

    workers = [threading.Thread(target=work, name=f"raw reader {number}") for number in range(threads)]
    try:
        for file in files:
            descriptors[file] = os.open(file, os.O_RDONLY | flags)
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    if errors:
        raise errors[0]
    return sum(totals)


def _chunks(files: Sequence[Path], step: int) -> Iterator[tuple[Path, int]]:
    for file in files:
        for offset in range(0, file.stat().st_size, step):
            yield file, offset
