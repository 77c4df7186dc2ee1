"""A process of the benchmark `nodes`: runs its stage; the first one answers on its standard output.

    python -m benchmarks.nodes_stage FOLDER PLAN

Each line that it reads is a number of decode steps, which it answers with their mean seconds, or "logits", which it
answers with a hash of those of the first steps. The end of its input ends it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

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
            found = decoder.seconds_per_step(int(line))
        print(json.dumps(found), flush=True)


def digest(decoder: Decoder) -> str:
    """Return a hash of the logits of the prompt and the first steps."""
    return hashlib.sha256(decoder.logits(LOGITS).float().numpy().tobytes()).hexdigest()


def main(folder: str, plan: str) -> None:
    """Run this process's stage."""
    torch.set_num_threads(1)
    run_over_nodes(folder, NodesPlan.from_json(Path(plan).read_text()), answer, slow_links=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
