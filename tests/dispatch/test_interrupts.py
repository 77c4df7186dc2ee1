"""Ctrl-C at any moment of a forward: what was entered is left, what was taken is given back, and no lock is kept.

Each test stops the same work at one call after another, until it comes through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.mapped.readahead import ReadAhead

from ..examples import alike
from .interrupting import interrupted_at
from .mapped_files import mapped_blocks
from .models import llama

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Python itself goes on where Ctrl-C meets a generator that is being thrown away."""

EVERY = 37
"""Of a whole generation one moment in so many is tried."""


def in_another_thread(work: Callable[[], object]) -> bool:
    """Whether `work` comes to its end in a thread that holds no lock."""
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(timeout=30)
    return bool(done)


@pytest.mark.slow
@alike("budget", [None, 2**17], first=1)
def test_a_reader_ahead_is_left(tmp_path: Path, budget: int | None) -> None:
    number, interrupted = 0, True
    while interrupted:
        # Blocks of its own: threads of a reader that was left may still page in a block of theirs.
        (tmp_path / str(number)).mkdir()
        blocks, registries = mapped_blocks(tmp_path / str(number), 4, elements=2**14)
        reader = ReadAhead(blocks, budget)

        def visit_all(reader: ReadAhead = reader, blocks: Any = blocks, registries: Any = registries) -> None:
            for block, registry in zip(blocks, registries):
                reader.visit(block, lambda _, registry=registry: registry["weight"][0])  # type: ignore[misc]

        interrupted = interrupted_at(number, visit_all, within="readahead")
        assert [block.users for block in blocks] == [0] * 4, number
        number += 1
    assert number > 20
    assert in_another_thread(lambda: [reader.visit(block, lambda _: True) for block in blocks])


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
@alike("device_map", [{"": 0, "model.layers": "cpu"}, {"": "cpu", "model.layers.1": 0}], first=1)
def test_a_generation_is_stopped_and_the_next_one_is_right(device_map: dict[str, object]) -> None:
    prompt = torch.arange(6).view(1, 6)
    expected = llama().generate(prompt, max_new_tokens=3, do_sample=False)
    model = dispatch_model(llama(), device_map, main_device=0)  # type: ignore[arg-type]
    where = [parameter.device for parameter in model.parameters()]

    def generate() -> torch.Tensor:
        return model.generate(prompt, max_new_tokens=3, do_sample=False)

    stopped = 0
    for number in range(0, 16 * EVERY, EVERY):
        stopped += interrupted_at(number, generate, within="bigmodel/dispatch")
        assert [parameter.device for parameter in model.parameters()] == where, number
    assert stopped > 8
    assert torch.equal(generate(), expected)
    assert in_another_thread(generate)
