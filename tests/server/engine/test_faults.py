"""A fault at any stage of a step, for one sequence: that one fails, the others get their tokens, nothing leaks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from bigmodel.server.engine import Done, Engine, EngineOptions, Event, Failed, Request, build_engine
from bigmodel.server.engine.compute.draft import ModelDrafter
from bigmodel.server.engine.compute.runner import PackedRunner
from bigmodel.server.engine.core import EngineCore
from bigmodel.server.engine.kv import prefix
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV, TokenPool
from bigmodel.server.engine.sampling import sampler
from bigmodel.server.engine.scheduling.request import Delta
from bigmodel.server.text.codec import Detokenizer
from tests.examples import alike
from tests.server.tiny import Collector, make_request, tiny_model, tiny_tokenizer

VICTIM, *OTHERS = ([seed] * 10 + list(range(1, 241)) + list(range(1, 121)) for seed in (5, 6, 7))
TOKENS = 20  # past the end of the third prompt block: the buffers grow in decode


class FaultError(Exception):
    """What the tests raise."""


def engine(draft: Any = None, **options: Any) -> Engine:
    options = {"kv_bytes": 64 << 20, "max_sequences": 4, "max_batch_tokens": 512, **options}
    return build_engine(tiny_model(), tiny_tokenizer(), options=EngineOptions(**options), draft_model=draft)


def requests(**victims: Any) -> list[Request]:
    """The victim, with sampling parameters of its own, and the others: greedy, drawn."""
    params: list[dict[str, Any]] = [{"temperature": 1.0, "seed": 1, **victims}, {"temperature": 0.0}, {"seed": 2}]
    return [
        make_request(prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=1, **chosen)
        for prompt, chosen in zip((VICTIM, *OTHERS), params, strict=True)
    ]


def results(core: EngineCore, asked: list[Request]) -> list[tuple[Event, list[int]]]:
    """The last event and the tokens of each request, all of them in the same steps."""
    for request in asked:
        core.add(request)
    while not core.idle:
        core.step()
    sinks = [request.sink for request in asked]
    return [(sink.wait(), sink.tokens()) for sink in sinks if isinstance(sink, Collector)]


def held(core: EngineCore) -> int:
    """Positions, sequences and requests that are still held, prefixes in the cache left out."""
    cached = PROMPT_BLOCK * len(core.scheduler.prefix)
    return (
        core.scheduler.pool.used
        - cached
        + len(core.scheduler.running)
        + len(core.scheduler.waiting)
        + len(core.requests)
    )


Concerns = Callable[..., bool]
"""Whether a call, with these arguments, is about the victim."""


def fails(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, concerns: Concerns) -> None:
    """Let a function raise where a call concerns the victim."""
    right = getattr(owner, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if concerns(*args):
            raise FaultError("secret")
        return right(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrong)


def stages(core: EngineCore, victim: Request) -> dict[str, tuple[Any, str, Concerns]]:
    """Where a step can fail: the function, and which of its calls concern the victim."""
    (sequence,) = victim.sequences
    scheduler = core.scheduler

    def computed(batch: Any, *, decoding: bool) -> bool:
        return any(one.sequence is sequence and one.sequence.decoding is decoding for one in batch)

    def starts(*_: Any) -> bool:
        return bool(scheduler.waiting) and scheduler.waiting[0] is sequence

    return {
        "text begins": (Detokenizer, "__init__", lambda made, codec, prompt, *_: prompt is victim.prompt),
        "admission": (scheduler.prefix, "match", lambda prompt, adapter: prompt is victim.prompt),
        "positions are taken": (TokenPool, "take", starts),
        "positions are reserved": (SequenceKV, "reserve", starts),
        "cached prefix is read": (
            scheduler.prefix,
            "copy_into",
            lambda kv, prompt, tokens, adapter: prompt is victim.prompt,
        ),
        "prefill": (core.runner, "run", lambda batch: computed(batch, decoding=False)),
        "keys and values are written": (SequenceKV, "write", lambda kv, *_: kv is sequence.kv),
        "prefix is cached": (scheduler.prefix, "insert", lambda kv, prompt, adapter: prompt is victim.prompt),
        "block is copied": (prefix, "_cut", lambda kv, index: kv is sequence.kv and index == 1),
        "buffers grow": (SequenceKV, "reserve", lambda kv, _: kv is sequence.kv and sequence.decoding),
        "decode": (core.runner, "run", lambda batch: computed(batch, decoding=True)),
        "sampling": (sampler, "choose", lambda chosen, _: chosen is sequence),
        "detokenisation": (
            Detokenizer,
            "add",
            lambda text, _: sequence.stream is not None and text is sequence.stream._detokenizer,
        ),
        "streaming out": (Collector, "put", lambda sink, event: sink is victim.sink and isinstance(event, Delta)),
    }


STAGES = list(stages(engine().core, make_request(VICTIM)))


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The tokens of the victim and of the others where nothing fails."""
    return [tokens for _, tokens in results(engine().core, requests())]


@pytest.mark.slow
@alike("stage", [*STAGES[1:], STAGES[0]], first=len(STAGES) - 1)
def test_a_fault_fails_its_sequence_and_no_other(
    stage: str, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine().core
    asked = requests()
    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        fails(patch, *stages(core, asked[0])[stage])
        (last, tokens), *others = results(core, asked)
    assert isinstance(last, Failed)
    assert (last.kind, "FaultError" in last.message, "secret" in last.message) == ("engine", True, False)
    assert tokens == alone[0][: len(tokens)]
    assert [(type(event), tokens) for event, tokens in others] == [(Done, tokens) for tokens in alone[1:]]
    assert held(core) == 0
    assert set(threading.enumerate()) <= threads
    # Afterwards everybody is served, the victim too.
    assert [tokens for _, tokens in results(core, requests())] == alone
    core.scheduler.prefix.clear()
    assert core.scheduler.pool.used == 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["prefill", "decode", "keys and values are written"])
def test_a_fault_that_does_not_come_again_fails_nobody(
    stage: str, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine().core
    asked = requests()
    owner, name, concerns = stages(core, asked[0])[stage]
    came = 0

    def once(*args: Any) -> bool:
        nonlocal came
        came += concerns(*args)
        return came == 1 and concerns(*args)

    fails(monkeypatch, owner, name, once)
    assert [tokens for _, tokens in results(core, asked)] == alone
    assert came > 1
    assert held(core) == 0


class FaultyGrammar:
    """A grammar that allows everything, and raises in one of its methods."""

    complete = False

    def __init__(self, method: str) -> None:
        self._method = method

    def state(self) -> FaultyGrammar:
        self._called("state")
        return self

    def begin(self) -> None:
        self._called("begin")

    def propose(self, draft: tuple[int, ...]) -> None:
        self._called("propose")

    def ready_soon(self, until: float) -> bool:
        self._called("ready_soon")
        return True

    def check(self) -> None:
        self._called("check")

    def close(self) -> None:
        pass

    def mask(self, scores: torch.Tensor) -> None:
        self._called("mask")

    def advance(self, token: int) -> None:
        self._called("advance")

    def _called(self, method: str) -> None:
        if method == self._method:
            raise FaultError("secret")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["state", "begin", "propose", "ready_soon", "check", "mask", "advance"])
def test_a_grammar_that_raises_fails_its_sequence_and_no_other(method: str, alone: list[list[int]]) -> None:
    core = engine().core
    (last, _), *others = results(core, requests(grammar=FaultyGrammar(method)))
    assert isinstance(last, Failed)
    assert "FaultError" in last.message
    assert [tokens for _, tokens in others] == alone[1:]
    assert held(core) == 0


@pytest.mark.slow
def test_likeliest_tokens_that_cannot_be_chosen_together_are_chosen_alone(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine().core
    asked = requests(temperature=0.0)
    expected = results(engine().core, requests(temperature=0.0))
    fails(monkeypatch, sampler, "likeliest", lambda logits: len(logits) > 1)
    assert results(core, asked) == expected


def test_a_sink_that_takes_nothing_leaves_the_others_alone(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine().core
    asked = requests()
    gone = asked[0].sink
    fails(monkeypatch, Collector, "put", lambda sink, event: sink is gone)
    for request in asked:
        core.add(request)
    while not core.idle:
        core.step()
    others = [request.sink for request in asked[1:] if isinstance(request.sink, Collector)]
    for sink in others:
        assert isinstance(sink.wait(), Done)
    assert [sink.tokens() for sink in others] == alone[1:]
    assert held(core) == 0


@pytest.mark.slow
def test_an_end_that_cannot_be_sent_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, Collector, "put", lambda sink, event: isinstance(event, Done))
    results_ = results(engine().core, requests())
    assert [event for event, _ in results_] == [Failed("engine", "the end of the answer could not be sent")] * 3


# --- draft models -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_draft_model_that_fails_at_one_sequence_drafts_for_the_others(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(tiny_model()).core
    asked = requests()
    (victim,) = asked[0].sequences
    fails(monkeypatch, ModelDrafter, "propose", lambda drafter, sequences: victim in sequences)
    assert [tokens for _, tokens in results(core, asked)] == alone
    assert not victim.takes_drafts
    assert core.counts.accepted > 0
    assert held(core) == 0


@pytest.mark.slow
def test_a_draft_model_that_fails_within_a_forward_forgets_what_it_had_not_computed(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(tiny_model()).core
    assert isinstance(core.drafter, ModelDrafter)
    calls = 0

    def third(*_: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls == 3

    runner = core.drafter._runner
    assert isinstance(runner, PackedRunner)
    fails(monkeypatch, runner, "compute", third)
    asked = requests(temperature=0.0)
    assert results(core, asked)[1:] == [(Done(len(p), TOKENS, 0), t) for p, t in zip(OTHERS, alone[1:], strict=True)]
    assert all(sequence.takes_drafts for request in asked for sequence in request.sequences)


@pytest.mark.slow
def test_a_draft_model_whose_context_is_shorter_than_it_says_costs_drafts_only(alone: list[list[int]]) -> None:
    torch.manual_seed(0)
    short = transformers.GPT2Config(vocab_size=len(tiny_tokenizer()), n_embd=16, n_layer=1, n_head=2, n_positions=376)
    core = engine(transformers.GPT2LMHeadModel(short).eval()).core
    assert isinstance(core.drafter, ModelDrafter)
    core.drafter.max_length = 1024
    assert [tokens for _, tokens in results(core, requests())] == alone
    assert core.counts.drafted > 0
    assert held(core) == 0


# --- the thread ---------------------------------------------------------------------------------------


def test_the_engine_s_thread_survives(alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine()
    running.start()
    asked = requests()
    (victim,) = asked[0].sequences
    fails(monkeypatch, SequenceKV, "write", lambda kv, *_: kv is victim.kv)
    sinks = [request.sink for request in asked]
    for request in asked:
        running.submit(request)
    assert [type(sink.wait()) for sink in sinks if isinstance(sink, Collector)] == [Failed, Done, Done]
    assert running.healthy
    assert (running.unfinished, running.failure) == (0, None)
    running.stop()
