"""An engine tells its observer of every request and of every token, in the order in which they come."""

from __future__ import annotations

from typing import Any

from bigmodel.server.engine import Done, EngineOptions, build_engine
from bigmodel.server.engine.observer import Observer
from tests.server.tiny import ask, tiny_model, tiny_tokenizer


class Listener(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, tuple[Any, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Observer, name):
            return super().__getattribute__(name)
        return lambda *told: self.heard.append((name, told))

    def told(self, name: str) -> list[tuple[Any, ...]]:
        return [told for heard, told in self.heard if heard == name]


def test_a_request_is_followed_from_its_start_to_its_end() -> None:
    listener = Listener()
    engine = build_engine(tiny_model(), tiny_tokenizer(), options=EngineOptions(kv_bytes=2**20), observer=listener)
    engine.start()
    try:
        ask(engine, [1, 2, 3, 4, 5], max_tokens=3, ignore_eos=True).wait()
    finally:
        engine.stop()
    names = [name for name, _ in listener.heard]
    assert names.index("started") < names.index("first_token") < names.index("next_token") < names.index("finished")
    assert (names.count("started"), names.count("first_token"), names.count("next_token")) == (1, 1, 2)
    assert sum(prompt for prompt, _ in listener.told("tokens")) == 5
    assert sum(generated for _, generated in listener.told("tokens")) == 3
    ((request, outcome, seconds),) = listener.told("finished")
    assert (request.prompt, outcome) == ([1, 2, 3, 4, 5], "ok")
    assert seconds > 0
    assert all(sequences == 1 for _, sequences in listener.told("step"))


def test_nobody_needs_to_listen() -> None:
    engine = build_engine(tiny_model(), tiny_tokenizer(), options=EngineOptions(kv_bytes=2**20))
    engine.start()
    try:
        assert isinstance(ask(engine, [1, 2], max_tokens=2, ignore_eos=True).wait(), Done)
    finally:
        engine.stop()
