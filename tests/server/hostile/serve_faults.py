"""A process that is `bigmodel serve`; steps of sequences with certain prompts fail, and slow headers are cut sooner.

python -m tests.server.hostile.serve_faults ARGUMENTS OF bigmodel
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch

from bigmodel.cli.main import main
from bigmodel.server.engine.compute.runner import PackedRunner
from bigmodel.server.engine.kv.buffers import SequenceKV
from bigmodel.server.engine.sampling import sampler
from bigmodel.server.engine.scheduling.request import Sequence
from bigmodel.server.http import client_limits
from bigmodel.server.text.codec import Detokenizer

FAULTS = {
    "prefill": [7, 7, 7],
    "decode": [8, 8, 8],
    "keys and values": [9, 9, 9],
    "sampling": [10, 10, 10],
    "text": [11, 11, 11],
}
"""Prompts by the stage that fails in a step of their sequences."""

HEADER_SECONDS = 2.0
"""Time limit for headers, in place of the server's own."""


class FaultError(Exception):
    """What the stages raise."""


def _fails(owner: Any, name: str, concerns: Callable[..., bool]) -> None:
    """Let a function raise where ``concerns`` is true of its arguments."""
    right = getattr(owner, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if concerns(*args):
            raise FaultError("secret detail of the failure")
        return right(*args, **kwargs)

    setattr(owner, name, wrong)


def _any_has(sequences: Iterable[Sequence], stage: str, *, decoding: bool) -> bool:
    return any(one.request.prompt == FAULTS[stage] and one.decoding is decoding for one in sequences)


def _inject() -> None:
    # What belongs to a sequence whose keys and values, or whose text, fail; by ids it would be others later.
    of_fault: WeakSet[object] = WeakSet()

    def run_fails(runner: PackedRunner, batch: Any) -> bool:
        sequences = [scheduled.sequence for scheduled in batch]
        of_fault.update(one.kv for one in sequences if one.request.prompt == FAULTS["keys and values"])
        return _any_has(sequences, "prefill", decoding=False) or _any_has(sequences, "decode", decoding=True)

    def text_begins(text: Detokenizer, codec: Any, prompt: Any, *rest: Any) -> bool:
        if prompt == FAULTS["text"]:
            of_fault.add(text)
        return False

    _fails(PackedRunner, "run", run_fails)
    _fails(SequenceKV, "write", lambda kv, *_: kv in of_fault)
    _fails(sampler, "choose", lambda sequence, _: sequence.request.prompt == FAULTS["sampling"])
    _fails(Detokenizer, "__init__", text_begins)
    _fails(Detokenizer, "add", lambda text, *_: text in of_fault)


if __name__ == "__main__":
    torch.set_num_threads(1)
    client_limits.HEADER_SECONDS = HEADER_SECONDS
    _inject()
    main(sys.argv[1:])
