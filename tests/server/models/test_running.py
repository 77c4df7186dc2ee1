"""A model that was unloaded holds nothing, whoever still holds a part of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bigmodel.devices import memory_allocated
from bigmodel.server import EngineOptions
from bigmodel.server.loading import load
from bigmodel.server.models.garbage import collect, exemptions
from bigmodel.server.models.running import RunningModel, forget_frames
from tests.server.models.several import CONTEXT, SEQUENCES, save
from tests.server.tiny import ask


@pytest.mark.parametrize("budget", [pytest.param("32MiB", marks=pytest.mark.long), "2400KB"])
@pytest.mark.slow
def test_memory_is_back_though_the_engine_and_weights_are_still_held(
    tmp_path: Path, accelerators: None, budget: str
) -> None:
    made = exemptions()
    folder = save(tmp_path, 2, layers=4)
    loaded = load(folder, max_memory={0: budget, "cpu": "1GiB"}, batch_size=SEQUENCES, context_length=CONTEXT)
    assert bool(loaded.plan.streamed) == (budget != "32MiB")
    running = RunningModel.of("c", loaded, EngineOptions(max_sequences=SEQUENCES))
    running.engine.start()
    ask(running.engine, "the cat " * 4, max_tokens=2).wait()
    assert memory_allocated(0) > 0
    held = [running.engine, *running.model.parameters()]
    del loaded
    running.unload()
    collect(made)
    assert memory_allocated(0) == 0
    assert len(held) > 1
    assert not running.engine.healthy


@pytest.mark.slow
def test_steps_are_computed_within_the_given_context(tmp_path: Path) -> None:
    entered = []

    @contextmanager
    def around() -> Iterator[None]:
        entered.append(len(entered))
        yield

    loaded = load(save(tmp_path, 0), max_memory={"cpu": "1GiB"}, batch_size=SEQUENCES, context_length=CONTEXT)
    running = RunningModel.of("a", loaded, EngineOptions(max_sequences=SEQUENCES), around_step=around)
    running.engine.start()
    ask(running.engine, "the cat", max_tokens=4, ignore_eos=True).wait()
    running.close()
    assert len(entered) >= running.engine.core.steps >= 4


class Node:
    """Refers to itself: only a collection of garbage frees it."""

    def __init__(self) -> None:
        self.own = self


def test_an_error_holds_nothing_of_what_it_passed() -> None:
    def load_weights() -> None:
        large = Node()
        held.append(weakref.ref(large))
        raise OSError("the disk is gone")

    def load_model() -> None:
        large = Node()
        held.append(weakref.ref(large))
        try:
            load_weights()
        except OSError as error:
            raise ValueError("no model") from error

    held: list[weakref.ref[Node]] = []
    with pytest.raises(ValueError, match="no model") as raised:
        load_model()
    gc.collect()
    assert all(each() is not None for each in held)
    forget_frames(raised.value)
    gc.collect()
    assert not any(each() is not None for each in held)


@pytest.mark.timeout(20)
def test_errors_that_come_from_each_other_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    forget_frames(first)
    assert first.__cause__ is second
