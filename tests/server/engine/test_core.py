"""Steps of the engine without its thread, and the output stream of one sequence."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bigmodel.devices import virtual
from bigmodel.dispatch import dispatch_model
from bigmodel.errors import CheckpointFormatError
from bigmodel.server.engine import Done, EngineOptions, Event, Failed, build_engine
from bigmodel.server.engine.core import EngineCore, OutputStream, WeightFiles
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from bigmodel.server.engine.scheduling.request import Delta, Sequence, TokenLogprob
from bigmodel.server.loading import load
from bigmodel.server.text.codec import TextCodec
from tests.examples import alike
from tests.server import oracle
from tests.server.models.several import CONTEXT, SEQUENCES, save
from tests.server.tiny import Collector, ask, make_request, tiny_model, tiny_tokenizer


def core(**options: Any) -> EngineCore:
    options = {"kv_bytes": 64 << 20, "max_sequences": 2, "prefix_cache": False, **options}
    return build_engine(tiny_model(), tiny_tokenizer(), options=EngineOptions(**options)).core


def put(core: EngineCore, prompt: str = "the cat", **params: Any) -> Collector:
    """Hand a request in; where its events arrive."""
    request = make_request(prompt, **{"ignore_eos": True, **params})
    core.add(request)
    assert isinstance(request.sink, Collector)
    return request.sink


def run(core: EngineCore) -> int:
    """Step until nothing is left to do; how many steps that took."""
    steps = 0
    while not core.idle:
        assert core.step()
        steps += 1
    return steps


def test_without_requests_there_is_nothing_to_compute() -> None:
    idle = core()
    assert idle.idle
    assert not idle.step()
    assert idle.steps == 0


@pytest.mark.slow
def test_more_requests_than_slots_get_the_tokens_that_they_get_alone() -> None:
    shared = core()
    asked = [put(shared, prompt, max_tokens=4, temperature=0) for prompt in ("the cat", "in the", "then")]
    assert run(shared) == 8  # two at once, then the third
    for collector, prompt in zip(asked, ("the cat", "in the", "then"), strict=True):
        assert isinstance(collector.wait(), Done)
        tokens = tiny_tokenizer().encode(prompt)
        params = make_request(prompt, max_tokens=4, temperature=0, ignore_eos=True).params
        assert collector.tokens() == oracle.generate(tiny_model(), tiny_tokenizer(), tokens, params)
    assert (shared.counts.generated, shared.steps) == (12, 8)


def test_done_counts_the_tokens_of_every_sequence() -> None:
    shared = core()
    collector = put(shared, n=2, max_tokens=3)
    run(shared)
    assert collector.wait() == Done(len(tiny_tokenizer().encode("the cat")), 6, 0)


def test_only_tokens_stored_before_a_request_count_as_cached() -> None:
    shared = core(prefix_cache=True)
    prompt = "in the cat " * 40
    for cached in (0, len(tiny_tokenizer().encode(prompt)) // PROMPT_BLOCK * PROMPT_BLOCK):
        collector = put(shared, prompt, n=2, max_tokens=2)
        run(shared)
        done = collector.wait()
        assert isinstance(done, Done)
        assert done.cached_tokens == cached


@pytest.mark.parametrize("steps", [0, 1])
def test_a_failed_request_frees_its_memory(steps: int) -> None:
    shared = core()
    collector = put(shared, max_tokens=50)
    (request,) = shared.requests.values()
    for _ in range(steps):
        shared.step()
    shared.fail(request, "cancelled", "nobody waits")
    assert collector.wait() == Failed("cancelled", "nobody waits")
    assert shared.idle
    assert shared.scheduler.pool.used == 0
    shared.fail(request, "cancelled", "again")  # of no effect
    assert not shared.step()


def test_a_request_whose_grammar_cannot_start_fails_alone() -> None:
    class Unusable:
        def state(self) -> None:
            raise RuntimeError("secret")

    shared = core()
    bad, good = put(shared, grammar=Unusable()), put(shared, max_tokens=2)
    run(shared)
    assert bad.wait() == Failed("engine", "computing a step failed: RuntimeError")
    assert isinstance(good.wait(), Done)


class LateFormat:
    """A grammar that allows everything, whose masks come when they have been asked for so many times; with the last
    token the answer is complete."""

    def __init__(self, asked: int, complete_at: int = 1 << 30) -> None:
        self._asked, self._left = asked, asked
        self._complete_at = complete_at
        self._tokens = 0

    def state(self) -> LateFormat:
        return self

    @property
    def ready(self) -> bool:
        self._left -= 1
        return self._left < 0

    def ready_soon(self, until: float) -> bool:
        return self.ready

    @property
    def complete(self) -> bool:
        return self._left < 0 and self._tokens >= self._complete_at

    def advance(self, token: int) -> None:
        self._tokens += 1
        self._left = self._asked

    def begin(self) -> None:
        """It is there."""

    def propose(self, draft: tuple[int, ...]) -> None:
        assert not draft

    def check(self) -> None:
        """It never fails."""

    def mask(self, scores: torch.Tensor) -> None:
        assert self._left < 0, "it was not waited for"

    def close(self) -> None:
        """Nothing is held."""

    def fileno(self) -> int:
        return -1


def test_a_sequence_whose_masks_come_late_has_its_tokens_and_holds_up_no_other() -> None:
    expected, beside = core(), core()
    asked = [put(expected, prompt, max_tokens=8, temperature=0) for prompt in ("the cat", "in the")]
    run(expected)
    late = put(beside, "the cat", max_tokens=8, temperature=0, grammar=LateFormat(5))
    other = put(beside, "in the", max_tokens=8, temperature=0)
    steps = 0
    while not any(isinstance(event, Done) for event in list(drained(other))):
        assert beside.step()
        steps += 1
    assert steps == 8
    assert len(late.tokens()) < 8
    run(beside)
    list(drained(late))
    assert [late.tokens(), other.tokens()] == [one.tokens() for one in asked if list(drained(one))]
    assert late.finish_reason() == "length"
    assert beside.scheduler.pool.used == 0


@pytest.mark.parametrize(("complete_at", "reason"), [(3, "stop"), (4, "stop"), (5, "length")])
def test_an_answer_that_is_complete_where_it_may_be_no_longer_has_stopped(complete_at: int, reason: str) -> None:
    made = core()
    sink = put(made, max_tokens=4, grammar=LateFormat(3, complete_at))
    run(made)
    list(drained(sink))
    assert len(sink.tokens()) == min(complete_at, 4)
    assert sink.finish_reason() == reason
    assert made.scheduler.pool.used == 0


def test_a_request_that_fails_while_its_mask_is_awaited_frees_its_memory() -> None:
    made = core()
    sink = put(made, max_tokens=8, grammar=LateFormat(1 << 30))
    for _ in range(3):
        assert made.step()
    made.fail(made.requests[next(iter(made.requests))], "cancelled", "the request was cancelled")
    run(made)
    assert made.scheduler.pool.used == 0
    assert isinstance(list(drained(sink))[-1], Failed)


def drained(sink: Collector) -> Iterator[Event]:
    """What has arrived, one after the other."""
    while True:
        try:
            yield sink.next(0.0)
        except queue.Empty:
            return


def test_a_request_whose_prompt_cannot_be_cached_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = core()
    bad, good = put(shared, "in the", max_tokens=2), put(shared, max_tokens=2)

    def insert(kv: Any, prompt: list[int], adapter: str) -> None:
        if prompt == tiny_tokenizer().encode("in the"):
            raise RuntimeError("secret")

    monkeypatch.setattr(shared.scheduler.prefix, "insert", insert)
    run(shared)
    assert bad.wait() == Failed("engine", "computing a step failed: RuntimeError")
    assert isinstance(good.wait(), Done)
    assert shared.scheduler.pool.used == 0


def test_a_request_past_its_deadline_fails_and_others_go_on() -> None:
    shared = core()
    late, timely = put(shared, deadline=time.monotonic() + 5), put(shared, max_tokens=2)
    shared.expire(time.monotonic() + 6)
    failed = late.wait()
    assert isinstance(failed, Failed)
    assert failed.kind == "timeout"
    run(shared)
    assert isinstance(timely.wait(), Done)


CODEC = TextCodec(tiny_tokenizer())
END = tiny_tokenizer().eos_token_id


class Writer:
    """Feeds an output stream token by token, as the engine does."""

    def __init__(self, *, eos: frozenset[int] = frozenset((END,)), max_length: int = 100, **params: Any) -> None:
        self.sequence: Sequence = make_request([1, 2, 3], **params).sequences[0]
        self._stream = OutputStream(self.sequence, CODEC, eos, max_length)

    def write(self, text: str | bytes | list[int]) -> list[Delta]:
        """The deltas that the tokens of ``text`` bring forth, up to the last one."""
        tokens = text if isinstance(text, list) else [CODEC.encode(c)[0] for c in text] if isinstance(text, str) else []
        deltas: list[Delta] = []
        for token in tokens:
            self.sequence.output.append(token)
            delta = self._stream.take(token, TokenLogprob(token, -1.0))
            deltas += [] if delta is None else [delta]
            if deltas and deltas[-1].finish_reason is not None:
                break
        return deltas


def test_each_token_shows_its_text() -> None:
    assert [(d.text, d.finish_reason) for d in Writer().write("cat")] == [("c", None), ("a", None), ("t", None)]


def test_an_incomplete_character_is_held_back() -> None:
    halves = [CODEC.tokenizer.convert_tokens_to_ids(letter) for letter in "Ã¶"]  # the two bytes of ö
    (delta,) = Writer().write(halves)
    assert (delta.text, delta.token_ids, len(delta.logprobs)) == ("ö", tuple(halves), 2)


@pytest.mark.parametrize(("max_tokens", "max_length"), [(2, 100), (50, 5)])
def test_a_sequence_ends_at_its_limit_or_at_the_contexts(max_tokens: int, max_length: int) -> None:
    deltas = Writer(max_tokens=max_tokens, max_length=max_length).write("cats")
    assert [(d.text, d.finish_reason) for d in deltas] == [("c", None), ("a", "length")]


def test_an_end_token_is_not_shown() -> None:
    *_, last = Writer().write([*CODEC.encode("c"), END])
    assert (last.text, last.token_ids, last.finish_reason) == ("", (), "stop")


def test_an_end_token_may_be_ignored() -> None:
    deltas = Writer(ignore_eos=True).write([END, *CODEC.encode("c")])
    assert all(delta.finish_reason is None for delta in deltas)


def test_a_stop_string_is_not_shown_and_its_beginning_only_if_it_is_not_completed() -> None:
    deltas = Writer(stop=("end",)).write("an ex end!")
    assert "".join(delta.text for delta in deltas) == "an ex "
    assert deltas[-1].finish_reason == "stop"
    shown = [delta.text for delta in deltas]
    assert "e" not in shown  # held back until "x" shows that it begins no stop string
    assert "ex" in shown


def test_held_back_text_is_shown_at_the_end() -> None:
    deltas = Writer(stop=("end",), max_tokens=2).write("en")
    assert [(d.text, d.finish_reason) for d in deltas] == [("en", "length")]


GREEDY, DRAWN, SHOWN = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0, "logprobs": 2},
)


@pytest.mark.slow
@alike(
    "asked",
    [[GREEDY, DRAWN, SHOWN], [DRAWN] * 3, [GREEDY] * 3],
    first=1,
    ids=["mixed", "drawn", "greedy"],
)
def test_logits_come_to_the_host_once_in_a_step(asked: list[dict[str, Any]], accelerators: None) -> None:
    options = EngineOptions(kv_bytes=64 << 20, max_sequences=3, prefix_cache=False)
    device = build_engine(tiny_model().to("virtual:0"), tiny_tokenizer(), options=options).core
    host = core(max_sequences=3)
    sinks = [[put(each, max_tokens=4, **params) for params in asked] for each in (device, host)]
    assert device.step()
    before = virtual.host_waits()
    assert device.step()
    assert virtual.host_waits().since(before).copies_to_host == 1
    run(device)
    run(host)
    assert [sink.tokens() for sink in sinks[0]] == [sink.tokens() for sink in sinks[1]]


@pytest.fixture
def streamed_and_on_host(accelerators: None) -> tuple[EngineCore, EngineCore]:
    """An engine whose layers are streamed to an accelerator, which holds their keys and values, and one on the host."""
    layers = {"": "virtual:0", "model.layers": "cpu"}
    model = dispatch_model(tiny_model(), layers, main_device="virtual:0")
    options = EngineOptions(kv_bytes=16 << 20, max_sequences=2, prefix_cache=False, row_multiple=1)
    return build_engine(model, tiny_tokenizer(), options=options).core, core(row_multiple=1)


@pytest.mark.slow
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.one_of(st.none(), st.integers(0, 2**16)),
    late=st.booleans(),
    asked=st.sampled_from([[GREEDY, GREEDY], [GREEDY, DRAWN]]),
)
@example(seed=None, late=True, asked=[GREEDY, DRAWN])
def test_tokens_are_the_same_however_late_work_is_done(
    seed: int | None, late: bool, asked: list[dict[str, Any]], streamed_and_on_host: tuple[EngineCore, EngineCore]
) -> None:
    virtual.enable(count=2, strict=True, seed=seed, late_compute=late)
    sinks = [[put(each, max_tokens=3, **params) for params in asked] for each in streamed_and_on_host]
    for each in streamed_and_on_host:
        run(each)
    assert [sink.tokens() for sink in sinks[0]] == [sink.tokens() for sink in sinks[1]]


def test_weights_that_are_not_mapped_have_no_files() -> None:
    WeightFiles(tiny_model(), None).check()


@pytest.mark.slow
def test_requests_fail_while_a_file_is_too_short(tmp_path: Path) -> None:
    loaded = load(save(tmp_path, 0), max_memory={"cpu": "1GiB"}, batch_size=SEQUENCES, context_length=CONTEXT)
    engine = build_engine(loaded.model, loaded.tokenizer, loaded.plan, EngineOptions(max_sequences=SEQUENCES))
    engine.start()
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    before = ask(engine, "the cat", temperature=0.0, max_tokens=2)
    before.wait()
    os.truncate(path, 10)
    with pytest.raises(CheckpointFormatError, match="cut short while in use"):
        WeightFiles(loaded.model).check()
    failed = ask(engine, "the cat", max_tokens=2).wait()
    assert isinstance(failed, Failed)
    assert "cut short" in failed.message
    path.write_bytes(whole)
    after = ask(engine, "the cat", temperature=0.0, max_tokens=2)
    after.wait()
    engine.stop()
    assert after.tokens() == before.tokens() != []
