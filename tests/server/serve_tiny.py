"""A process that serves the tiny model as `bigmodel serve` does. Prints its port; exits with the server's code."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from server import EngineOptions, Loaded, Loading, Settings, create_app
from server.run import bind, run
from tests.server.tiny import tiny_model, tiny_tokenizer


class SlowOrBroken(torch.nn.Module):
    """Slows every forward down; raises when it meets the token 7 twice in a row."""

    def __init__(self, inner: Any, delay: float) -> None:
        super().__init__()
        self.inner = inner
        self.delay = delay

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(self.delay)
        if (ids[..., 1:].eq(7) & ids[..., :-1].eq(7)).any():
            raise RuntimeError("secret detail of the failure")
        out: torch.Tensor = self.inner(ids)
        return out


def main(delay: float, drain_timeout: float, loading: str) -> int:
    torch.set_num_threads(1)

    def loader(progress: Loading) -> Loaded:
        if loading == "broken":
            raise RuntimeError("no weights here")
        while loading == "endless":
            progress.report(1, 4)
            time.sleep(0.01)
        model = tiny_model()
        model.model.embed_tokens = SlowOrBroken(model.model.embed_tokens, delay)
        return Loaded(model, tiny_tokenizer())

    settings = Settings("tiny", drain_timeout=drain_timeout, engine=EngineOptions(kv_bytes=64 << 20))
    app = create_app(loader=loader, settings=settings)
    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    return run(app, listener, log_level="warning")


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""))
