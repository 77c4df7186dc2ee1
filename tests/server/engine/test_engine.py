"""The engine: right tokens, the same alone and in a batch, whatever happens around a request."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from bigmodel.server.engine import (
    Delta,
    Done,
    Engine,
    EngineOptions,
    EngineStoppedError,
    Failed,
    QueueFullError,
    State,
    build_engine,
)
from bigmodel.server.engine.compute.plain import PlainRunner
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from tests.server import oracle
from tests.server.serve_tiny import SlowOrBroken
from tests.server.tiny import Collector, ask, make_request, tiny_engine, tiny_model, tiny_tokenizer

B = PROMPT_BLOCK


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = tiny_engine()
    yield made
    made.stop()


def prompts(count: int, longest: int = 3 * B) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def settings(index: int) -> dict[str, Any]:
    """Different ways of choosing tokens, all reported with log-probabilities to compare bits."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.7, "min_p": 0.02, "repetition_penalty": 1.2},
        {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {65: 4.0}},
    ]
    return {**kinds[index % len(kinds)], "seed": index, "logprobs": 3, "ignore_eos": True}


def everything(collector: Collector, index: int = 0) -> list[Any]:
    """Tokens and the exact log-probabilities of the tokens and their alternatives."""
    return [
        (e.token_ids, e.logprobs, e.text, e.finish_reason)
        for e in collector.events
        if isinstance(e, Delta) and e.index == index
    ]


def flat(collector: Collector) -> tuple[list[int], list[Any], str]:
    deltas = [e for e in collector.events if isinstance(e, Delta)]
    return (
        [t for d in deltas for t in d.token_ids],
        [entry for d in deltas for entry in d.logprobs],
        "".join(d.text for d in deltas),
    )


def run_alone(made: Engine, asked: list[list[int]], tokens: int) -> list[Any]:
    results = []
    for index, prompt in enumerate(asked):
        collector = ask(made, prompt, max_tokens=tokens, **settings(index))
        assert isinstance(collector.wait(), Done)
        results.append(flat(collector))
    return results


@pytest.mark.slow
def test_tokens_are_equal_to_those_of_plain_generation(engine: Engine) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    asked = prompts(6, 40)
    requests = [make_request(p, max_tokens=8, **settings(i)) for i, p in enumerate(asked)]
    for request in requests:
        engine.submit(request)
    for request, prompt, collector in zip(
        requests,
        asked,
        [r.sink._put.__self__ for r in requests],
        strict=True,  # type: ignore[attr-defined]
    ):
        collector.wait()
        assert collector.tokens() == oracle.generate(model, tokenizer, prompt, request.params)


@pytest.mark.slow
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(engine: Engine) -> None:
    asked = prompts(6)
    alone = run_alone(engine, asked, 8)
    together = [ask(engine, p, max_tokens=8, **settings(i)) for i, p in enumerate(asked)]
    for collector, expected in zip(together, alone, strict=True):
        collector.wait()
        assert flat(collector) == expected


@pytest.mark.slow
def test_bits_are_equal_while_requests_arrive_and_leave() -> None:
    rng = random.Random(1)
    asked = prompts(12, 2 * B)
    quiet = tiny_engine(prefix_cache=False)
    alone = run_alone(quiet, asked, 6)
    quiet.stop()
    busy = tiny_engine(max_sequences=5, max_batch_tokens=5 + B)
    collectors: list[Collector] = []
    for index, prompt in enumerate(asked):
        disturbing = make_request(prompts(1, 300)[0], max_tokens=300, ignore_eos=True)
        if index % 3 == 0:
            busy.submit(disturbing)
        collectors.append(ask(busy, prompt, max_tokens=6, **settings(index)))
        time.sleep(rng.random() * 0.01)  # only varies what runs together; nothing depends on it
        if index % 3 == 0:
            busy.cancel(disturbing)
    for collector, expected in zip(collectors, alone, strict=True):
        collector.wait()
        assert flat(collector) == expected
    busy.stop()


@pytest.mark.slow
def test_bits_are_equal_if_sequences_are_preempted_and_recomputed() -> None:
    asked = prompts(5, 2 * B)
    roomy = tiny_engine()
    alone = run_alone(roomy, asked, 24)
    roomy.stop()
    per_token = 2 * 2 * 2 * 16 * 4
    tight = tiny_engine(kv_bytes=per_token * 4 * B, prefix_cache=False)
    collectors = [ask(tight, p, max_tokens=24, **settings(i)) for i, p in enumerate(asked)]
    for collector, expected in zip(collectors, alone, strict=True):
        assert isinstance(collector.wait(), Done)
        assert flat(collector) == expected
    assert tight.core.scheduler.preemptions > 0
    assert tight.core.scheduler.pool.used == 0
    tight.stop()


@pytest.mark.slow
def test_bits_are_equal_with_the_prefix_cache(engine: Engine) -> None:
    shared = prompts(1, 10)[0] * 100
    asked = [shared[: 3 * B] + extra for extra in prompts(6, 2 * B)]
    cold = tiny_engine(prefix_cache=False)
    expected = run_alone(cold, asked, 4)
    cold.stop()
    assert run_alone(engine, asked, 4) == expected
    again = ask(engine, asked[0], max_tokens=4, **settings(0))
    done = again.wait()
    assert isinstance(done, Done)
    assert done.cached_tokens >= 3 * B
    assert flat(again) == expected[0]
    assert engine.core.scheduler.prefix.hits >= 5 * 3 * B


@pytest.mark.slow
def test_choices_share_their_prompt_and_differ_in_what_they_draw(engine: Engine) -> None:
    prompt = prompts(1, 10)[0] * 50
    collector = ask(engine, prompt, n=4, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    collector.wait()
    texts = [tuple(collector.tokens(index)) for index in range(4)]
    assert len(set(texts)) == 4
    again = ask(engine, prompt, n=4, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    again.wait()
    assert [tuple(again.tokens(index)) for index in range(4)] == texts


@pytest.mark.slow
def test_stop_strings_end_the_text_before_them(engine: Engine) -> None:
    free = ask(engine, "the cat", max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
    free.wait()
    text = free.text()
    stop = text[8:11]
    held = ask(engine, "the cat", max_tokens=40, temperature=1.0, seed=1, ignore_eos=True, stop=(stop,))
    held.wait()
    assert held.text() == text[: text.index(stop)]
    assert held.finish_reason() == "stop"


def test_an_end_token_ends_the_text_and_is_not_shown(engine: Engine) -> None:
    eos = tiny_tokenizer().eos_token_id
    ended = ask(engine, "the cat", temperature=0, logit_bias={eos: 100.0})
    done = ended.wait()
    assert (ended.text(), ended.finish_reason()) == ("", "stop")
    assert isinstance(done, Done)
    assert done.completion_tokens == 1
    ignored = ask(engine, "the cat", temperature=0, logit_bias={eos: 100.0}, ignore_eos=True, max_tokens=3)
    ignored.wait()
    assert ignored.finish_reason() == "length"


def test_prompt_logprobs_are_those_of_a_whole_forward(engine: Engine) -> None:
    prompt = prompts(1, 3)[0] * 200
    collector = ask(engine, prompt[:300], max_tokens=0, logprobs=1, prompt_logprobs=True)
    collector.wait()
    (delta,) = [e for e in collector.events if isinstance(e, Delta)]
    assert delta.finish_reason == "length"
    assert delta.prompt_logprobs is not None
    assert delta.prompt_logprobs[0] is None
    with torch.no_grad():
        logits = tiny_model()(input_ids=torch.tensor([prompt[:300]])).logits[0]
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(prompt[1:300])[:, None])[:, 0]
    got = torch.tensor([entry.logprob for entry in delta.prompt_logprobs[1:] if entry])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_one_forward_serves_the_whole_batch() -> None:
    model = tiny_model()
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    engine = tiny_engine(model)
    calls.clear()
    collectors = [ask(engine, "the cat sat", max_tokens=30, ignore_eos=True) for _ in range(8)]
    for collector in collectors:
        collector.wait()
    engine.stop()
    assert engine.core.counts.generated == 8 * 30
    assert len(calls) == engine.core.steps <= 30 + 8


def slow_engine(delay: float = 0.005, **options: Any) -> Engine:
    model = tiny_model()
    model.model.embed_tokens = SlowOrBroken(model.model.embed_tokens, delay)
    return tiny_engine(model, **options)


def test_a_cancelled_request_is_gone_before_the_next_step() -> None:
    engine = slow_engine()
    request = make_request("the cat", max_tokens=900, ignore_eos=True)
    collector = request.sink
    assert isinstance(collector, Collector)
    engine.submit(request)
    collector.next()
    engine.cancel(request)
    seen = engine.core.counts.generated
    failed = collector.wait()
    assert isinstance(failed, Failed)
    assert failed.kind == "cancelled"
    assert engine.core.counts.generated <= seen + 2  # the step at work when it was cancelled, and one race
    assert engine.core.scheduler.pool.used == 0
    assert engine.unfinished == 0
    engine.cancel(request)  # of no effect
    engine.stop()


@pytest.mark.slow
def test_a_deadline_ends_waiting_requests_too() -> None:
    engine = slow_engine(max_sequences=1)
    ask(engine, "the cat", max_tokens=900, ignore_eos=True)
    late = ask(engine, "the dog", deadline=time.monotonic() + 0.1)
    failed = late.wait()
    assert isinstance(failed, Failed)
    assert failed.kind == "timeout"
    engine.stop()


@pytest.mark.slow
def test_a_full_engine_refuses_and_recovers() -> None:
    engine = slow_engine(max_sequences=1, max_queue=1)
    first, second = (ask(engine, "the cat", max_tokens=20, ignore_eos=True) for _ in range(2))
    with pytest.raises(QueueFullError, match="2 requests"):
        ask(engine, "the cat")
    first.wait()
    second.wait()
    ask(engine, "the cat").wait()
    engine.stop()


@pytest.mark.slow
def test_draining_finishes_running_requests_and_refuses_new_ones() -> None:
    engine = slow_engine()
    collector = ask(engine, "the cat", max_tokens=40, ignore_eos=True)
    collector.next()
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(engine.drain(30)))
    thread.start()
    while engine.state is State.RUNNING:
        time.sleep(0.001)
    with pytest.raises(EngineStoppedError, match="draining"):
        ask(engine, "the cat")
    assert isinstance(collector.wait(), Done)
    thread.join()
    assert drained == [True]
    engine.stop()
    assert engine.state is State.STOPPED


def test_stopping_fails_running_requests() -> None:
    engine = slow_engine()
    collector = ask(engine, "the cat", max_tokens=900, ignore_eos=True)
    collector.next()
    engine.stop()
    assert isinstance(collector.wait(), Failed)
    assert not engine.healthy
    assert "bigmodel-engine" not in [thread.name for thread in threading.enumerate() if thread is engine._thread]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["packed", "plain"])
def test_a_sequence_whose_forward_raises_fails_alone_and_the_engine_goes_on(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runner == "plain":
        monkeypatch.setattr("bigmodel.server.engine.build.choose_runner", lambda model, **_: PlainRunner(model))
    model = tiny_model()
    engine = build_engine(model, tiny_tokenizer(), options=EngineOptions(kv_bytes=64 << 20))
    engine.start()
    expected = ask(engine, "the cat", max_tokens=30, temperature=0, ignore_eos=True)
    assert isinstance(expected.wait(), Done)
    model.model.embed_tokens = SlowOrBroken(model.model.embed_tokens, 0.002)
    beside = ask(engine, "the cat", max_tokens=30, temperature=0, ignore_eos=True)
    beside.next()
    failed = ask(engine, [7, 7, 7]).wait()
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.message) == ("engine", "computing a step failed: RuntimeError")
    assert isinstance(beside.wait(), Done)
    assert beside.tokens() == expected.tokens()
    assert engine.healthy
    assert engine.core.scheduler.pool.used == PROMPT_BLOCK * len(engine.core.scheduler.prefix)
    engine.stop()


def test_a_failing_model_fails_every_request_and_is_reported() -> None:
    model = tiny_model()
    model.model.embed_tokens = SlowOrBroken(model.model.embed_tokens, 0.005)
    seen: list[BaseException] = []
    engine = build_engine(model, tiny_tokenizer(), options=EngineOptions(kv_bytes=64 << 20), on_failure=seen.append)
    engine.start()
    innocent = ask(engine, "the cat", max_tokens=900, ignore_eos=True)
    innocent.next()
    broken = ask(engine, [9, 9, 9])
    for collector in (broken, innocent):
        failed = collector.wait()
        assert isinstance(failed, Failed)
        assert failed.kind == "engine"
        assert "secret" not in failed.message
    engine.stop()
    assert engine.state is State.FAILED
    assert [str(error) for error in seen] == ["secret detail of the failure"]
    with pytest.raises(EngineStoppedError):
        ask(engine, "the cat")


def test_one_request_whose_token_cannot_be_chosen_does_not_harm_others(engine: Engine) -> None:
    class Broken:
        def state(self) -> Any:
            raise_on = self

            class State:
                complete = False
                begin = check = close = staticmethod(lambda: None)
                propose = staticmethod(lambda draft: None)
                ready_soon = staticmethod(lambda until: True)

                def mask(self, scores: torch.Tensor) -> None:
                    raise ValueError(f"no token fits {raise_on}")

            return State()

    good = ask(engine, "the cat", max_tokens=20, ignore_eos=True)
    bad = ask(engine, "the cat", grammar=Broken())
    assert isinstance(bad.wait(), Failed)
    assert isinstance(good.wait(), Done)
    assert engine.core.scheduler.pool.used == len(engine.core.scheduler.prefix) * B


@pytest.mark.slow
def test_a_model_computed_one_by_one_is_served_too() -> None:
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=261, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = transformers.BloomForCausalLM(config).eval()
    engine = tiny_engine(model)
    asked = prompts(3, 20)
    collectors = [ask(engine, p, max_tokens=6, temperature=0, ignore_eos=True) for p in asked]
    for prompt, collector in zip(asked, collectors, strict=True):
        collector.wait()
        params = make_request(prompt, max_tokens=6, temperature=0, ignore_eos=True).params
        assert collector.tokens() == oracle.generate(model, tiny_tokenizer(), prompt, params)
    engine.stop()
