"""Asks /health every few milliseconds until standard input is closed; then prints how long the slowest answer took.

    python -m benchmarks.hostile_probe PORT

A process of its own: what sends the attacks would hold up its own measurement. Standard library only.
"""

from __future__ import annotations

import asyncio
import sys
import time

from .serve_client import exchange, get

PAUSE = 0.01
DEAF = 30.0  # seconds after which an answer is no longer waited for


async def slowest(port: int) -> tuple[float, int]:
    """Seconds of the slowest answer, and the number of answers."""
    over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    longest, count = 0.0, 0
    while not over.done():
        begun = time.perf_counter()
        try:
            status, _ = await asyncio.wait_for(exchange(port, get("/health")), DEAF)
        except (OSError, asyncio.TimeoutError, IndexError, ValueError):
            status = 0
        longest = max(longest, time.perf_counter() - begun if status == 200 else DEAF)
        count += 1
        await asyncio.sleep(PAUSE)
    return longest, count


if __name__ == "__main__":
    print(*asyncio.run(slowest(int(sys.argv[1]))))
