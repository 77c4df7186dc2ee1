"""A process of the benchmark `nodes`: runs its stage; the first one answers on its standard output.

    python -m benchmarks.nodes_stage FOLDER PLAN ACCELERATOR

Its accelerator is a virtual one, made with ACCELERATOR, keyword arguments of `virtual.enable` in JSON.
Each line that it reads is a number of decode steps, which it answers with their mean seconds, or "logits", which it
answers with a hash of those of the first steps. The end of its input ends it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bigmodel.devices import virtual
from bigmodel.nodes import run_over_nodes
from bigmodel.plan import NodesPlan
from bigmodel.server.engine.compute.runner import input_device

from .steps import Decoder

LOGITS = 3


def answer(model: Any) -> None:
    """Answer each line of standard input."""
    decoder = Decoder(model, str(input_device(model)))
    for line in sys.stdin:
        if line.strip() == "logits":
            found: Any = digest(decoder)
        else:
            found = seconds_of_step(decoder, int(line))
        print(json.dumps(found), flush=True)


def seconds_of_step(decoder: Decoder, steps: int) -> float:
    """Return the mean seconds of so many steps after the first one, until the last one's logits are on the host."""
    decoder.start()
    decoder.step().cpu()
    begun = time.perf_counter()
    for _ in range(steps - 1):
        decoder.step()
    decoder.step().cpu()
    return (time.perf_counter() - begun) / steps


def digest(decoder: Decoder) -> str:
    """Return a hash of the logits of the prompt and the first steps."""
    return hashlib.sha256(decoder.logits(LOGITS).float().numpy().tobytes()).hexdigest()


def main(folder: str, plan: str, accelerator: str) -> None:
    """Run this process's stage."""
    virtual.enable(1, **json.loads(accelerator))
    torch.set_num_threads(1)
    run_over_nodes(folder, NodesPlan.from_json(Path(plan).read_text()), answer, slow_links=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
