"""A process that serves the tiny model as `bigmodel serve` does, and models that are slow or break.

    python -m tests.server.serve_tiny DELAY DRAIN_TIMEOUT [LOADING [LINGER [BATCH_FOLDER]]]

It prints its port, serves until a signal or a failure, and exits with the server's code.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import bigmodel.server.http.run
from bigmodel.server import EngineOptions, Loaded, Loading, Settings, create_app
from bigmodel.server.http.run import bind, run
from tests.server.tiny import tiny_model, tiny_tokenizer


class SlowOrBroken(torch.nn.Module):
    """Slows every forward; raises at the token 7 twice in a row, and from the token 9 twice in a row on for ever."""

    def __init__(self, inner: Any, delay: float) -> None:
        super().__init__()
        self.inner = inner
        self.delay = delay
        self.broken = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(self.delay)
        self.broken = self.broken or _twice(ids, 9)
        if self.broken or _twice(ids, 7):
            raise RuntimeError("secret detail of the failure")
        out: torch.Tensor = self.inner(ids)
        return out


class Gated(torch.nn.Module):
    """Lets a given number of forwards through."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.allowed = threading.Semaphore(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.allowed.acquire(timeout=60)
        out: torch.Tensor = self.inner(ids)
        return out


def _twice(ids: torch.Tensor, token: int) -> bool:
    return bool((ids[..., 1:].eq(token) & ids[..., :-1].eq(token)).any())


def main(delay: str, drain_timeout: str, loading: str = "", linger: str = "0", folder: str = "") -> None:
    """Serve with seconds of delay in each forward; LOADING may be "broken" or "endless"; LINGER: seconds that the
    process goes on after a failure."""
    torch.set_num_threads(1)
    bigmodel.server.http.run.LINGER_SECONDS = float(linger)

    def loader(progress: Loading) -> Loaded:
        if loading == "broken":
            raise RuntimeError("no weights here")
        while loading == "endless":
            progress.report(1, 4)
            time.sleep(0.01)
        model = tiny_model()
        model.model.embed_tokens = SlowOrBroken(model.model.embed_tokens, float(delay))
        return Loaded(model, tiny_tokenizer())

    settings = Settings(
        "tiny",
        drain_timeout=float(drain_timeout),
        engine=EngineOptions(kv_bytes=64 << 20),
        batch_folder=Path(folder) if folder else None,
    )
    app = create_app(loader=loader, settings=settings)
    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    sys.exit(run(app, listener, log_level="warning"))


if __name__ == "__main__":
    main(*sys.argv[1:])
