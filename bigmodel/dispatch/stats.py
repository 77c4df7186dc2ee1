"""What streaming did: bytes, waits, hits and misses."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class StreamStats:
    """Counters of one device's streamed blocks since they were last reset.

    Attributes:
        bytes_from_ram: Bytes fetched from host memory.
        bytes_from_disk: Bytes fetched from memory-mapped checkpoints.
        fetches: Blocks fetched, prefetched ones included.
        hits: Acquired blocks that were on the device or on their way to it.
        misses: Acquired blocks whose fetch began only then.
        seconds_waited: Seconds that forwards waited for fetches (on devices with streams of their own the device
            waits instead, and this stays near zero).
    """

    bytes_from_ram: int = 0
    bytes_from_disk: int = 0
    fetches: int = 0
    hits: int = 0
    misses: int = 0
    seconds_waited: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the counters by name."""
        return asdict(self)

    def reset(self) -> None:
        """Set all counters to zero."""
        self.__init__()  # type: ignore[misc]
