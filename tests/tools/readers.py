"""Counts the files of the project that one call enters: those that somebody opens who follows it.

    python -m tests.tools.readers forward | plan | chat

The forward is that of a model whose blocks are streamed from RAM, the plan that of a Llama in memory, the chat one
completion over HTTP, followed in all threads. Each is done once before it is counted, which leaves out what is made the
first time. So are the files of the virtual accelerator, which stand in for PyTorch's own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (f"{ROOT / 'bigmodel'}{os.sep}", f"{ROOT / 'server'}{os.sep}")
STAND_IN = f"{ROOT / 'bigmodel' / 'devices' / 'virtual'}{os.sep}"

_entered: set[str] = set()


def forward() -> set[str]:
    """Return the files that a forward of a model enters whose blocks are streamed."""
    import torch
    from torch import nn

    from bigmodel.devices import virtual
    from bigmodel.dispatch import dispatch_model

    virtual.enable(1, 1 << 30)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))).eval()
    inputs = torch.zeros(1, 64, device="virtual:0")
    dispatch_model(model, {str(index): "cpu" for index in range(4)}, main_device=0)
    with torch.inference_mode():
        return _files_of(lambda: model(inputs))


def plan() -> set[str]:
    """Return the files that planning a Llama in memory enters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import bigmodel.plan

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes))
    return _files_of(lambda: bigmodel.plan.plan(model))


def chat() -> set[str]:
    """Return the files that a chat completion enters, from the request's first byte to the answer's last."""
    from tests.server.live import MODEL, serving, tiny_app

    body = {"model": MODEL, "messages": [{"role": "user", "content": "Once"}], "max_tokens": 4}
    headers = {"Content-Type": "application/json"}

    def complete() -> None:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    with serving(tiny_app(engine={"host_linear": "torch"})) as url:
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        return _files_of(complete)


COUNTED: dict[str, Callable[[], set[str]]] = {"forward": forward, "plan": plan, "chat": chat}


def _files_of(call: Callable[[], object]) -> set[str]:
    """Return the files that the second `call` enters, without the stand-in for PyTorch's own."""
    call()
    _entered.clear()
    call()
    paths = {os.path.realpath(path) for path in _entered}
    return {os.path.relpath(path, ROOT) for path in paths if not path.startswith(STAND_IN)}


def _note(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(PRODUCT):
        _entered.add(code.co_filename)


def main() -> None:
    """Print the number of files, and their names."""
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COUNTED)
    what = parser.parse_args().what
    threading.setprofile(_note)  # before any thread starts: those that run already are not followed
    sys.setprofile(_note)
    files = COUNTED[what]()
    print(f"{what}: {len(files)} files", *sorted(files), sep="\n  ")


if __name__ == "__main__":
    main()
