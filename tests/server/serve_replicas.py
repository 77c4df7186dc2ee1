"""A process that serves two replicas of the tiny model through Ray Serve."""

from __future__ import annotations

import socket
import sys

from fastapi import FastAPI

from server.replicas import run_replicas


def build() -> FastAPI:
    import torch

    from tests.server.live import tiny_app

    torch.set_num_threads(1)
    return tiny_app()


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    print(port, flush=True)
    return run_replicas(build, replicas=2, host="127.0.0.1", port=port, max_requests=64, drain_timeout=5)


if __name__ == "__main__":
    sys.exit(main())
