"""What the processes of the tests of `run_over_nodes` run: generate, and write the tokens and the time of a step.

torchrun ... -m tests.nodes.deployment FOLDER PLAN OUTPUT [--slow] [--kill RANK]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bigmodel.errors import ServeError
from bigmodel.nodes import run_over_nodes
from bigmodel.plan import NodesPlan

PROMPT = [[1, 2, 3, 4, 5], [0, 0, 6, 7, 8]]
MASK = [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]


def generated(model: Any, tokens: int = 6) -> dict[str, Any]:
    """Return tokens and logits that a model generates greedily from two prompts, one of them padded, and seconds."""
    began = time.perf_counter()
    output = model.generate(
        torch.tensor(PROMPT),
        attention_mask=torch.tensor(MASK),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - began
    return {
        "tokens": output.sequences.tolist(),
        "logits": torch.stack(output.logits).double().tolist(),
        "seconds": seconds,
        "cpu": sum(each.numel() for each in model.parameters()),
    }


def main() -> None:
    """Run this process's stage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("plan")
    parser.add_argument("output", type=Path)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--kill", type=int, default=None)
    options = parser.parse_args()
    first_try = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def work(model: Any) -> None:
        generated(model)
        if options.kill is not None and first_try:
            os.kill(int((options.output / f"{options.kill}.pid").read_text()), signal.SIGKILL)
        found = generated(model)
        longer = generated(model, 16) if options.slow else found
        (options.output / "found.json").write_text(json.dumps({**found, "longer": longer["seconds"]}))

    (options.output / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    plan = NodesPlan.from_json(Path(options.plan).read_text())
    try:
        run_over_nodes(options.folder, plan, work, options.slow)
    except ServeError as error:
        (options.output / f"{os.environ['RANK']}.error").write_text(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
