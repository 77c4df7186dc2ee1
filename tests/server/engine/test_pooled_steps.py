"""Vectors are computed in the engine's steps, beside text, chunk by chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.dispatch import dispatch_model
from bigmodel.server.engine import Delta, Done, EngineOptions, Failed, Request, SamplingParams, build_engine
from bigmodel.server.engine.compute.plain import PlainRunner
from bigmodel.server.engine.core import EngineCore
from bigmodel.server.engine.sampling.pooling import PoolingKind, PoolingParams
from tests.examples import alike
from tests.server import oracle
from tests.server.encoders import cross_encoder, encoder, pair_tokenizer, states
from tests.server.engine.sampling.test_pooling import OWN
from tests.server.engine.test_core import put, run
from tests.server.tiny import Collector, tiny_model, tiny_tokenizer

PROMPTS = [list(range(5)), list(range(100)), [7] * 40, list(range(30, 33))]


def core(model: Any = None, **options: Any) -> EngineCore:
    options = {"kv_bytes": 64 << 20, "max_sequences": 3, "max_batch_tokens": 67, **options}
    return build_engine(model or tiny_model(), tiny_tokenizer(), options=EngineOptions(**options)).core


def ask(core: EngineCore, prompt: list[int], kind: PoolingKind, types: tuple[int, ...] | None = None) -> Collector:
    sink = Collector()
    params = SamplingParams(max_tokens=0, pooling=PoolingParams(kind, types))
    core.add(Request(f"v{id(sink)}", prompt, params, sink))
    return sink


def vector(collector: Collector) -> torch.Tensor:
    assert isinstance(collector.wait(), Done)
    (delta,) = (event for event in collector.events if isinstance(event, Delta))
    assert delta.finish_reason == "stop"
    found: torch.Tensor = delta.vector
    return found


def check(found: torch.Tensor, own: torch.Tensor) -> None:
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["last", "mean", "cls", "max"])
def test_vectors_and_texts_share_steps(kind: PoolingKind) -> None:
    shared = core()
    text = put(shared, max_tokens=12, temperature=0)
    asked = [ask(shared, prompt, kind) for prompt in PROMPTS]
    again = ask(shared, PROMPTS[1], kind)  # its beginning is in the cache by now
    run(shared)
    for prompt, collector in zip([*PROMPTS, PROMPTS[1]], [*asked, again], strict=True):
        check(vector(collector), OWN[kind](states(tiny_model(), prompt)))
    text.wait()
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompt = tiny_tokenizer().encode("the cat")
    assert text.tokens() == oracle.generate(tiny_model(), tiny_tokenizer(), prompt, params)


def test_beside_vectors_the_output_layer_computes_only_what_is_sampled() -> None:
    model = tiny_model()
    seen: list[int] = []
    shared = core(model, host_linear="torch", row_multiple=1)
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    ask(shared, PROMPTS[1], "mean")
    run(shared)
    assert set(seen) == {1}


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_models_that_are_computed_one_by_one_give_the_same(kind: PoolingKind, cached: bool) -> None:
    plain = core()
    plain.runner = PlainRunner(tiny_model(), cached=cached)
    plain.scheduler.prefix.enabled = False
    asked = [ask(plain, prompt, kind) for prompt in PROMPTS]
    run(plain)
    for prompt, collector in zip(PROMPTS, asked, strict=True):
        check(vector(collector), OWN[kind](states(tiny_model(), prompt)))


@alike("layers", [{"": "cpu"}, {"": "virtual:0", "model.layers": "cpu"}], first=1)
@pytest.mark.slow
def test_a_streamed_model_gives_the_same(layers: dict[str, str], accelerators: None) -> None:
    streamed = core(dispatch_model(tiny_model(), layers, main_device="virtual:0"), kv_bytes=16 << 20)
    text = put(streamed, max_tokens=4, temperature=0)
    asked = [ask(streamed, prompt, "mean") for prompt in PROMPTS]
    run(streamed)
    for prompt, collector in zip(PROMPTS, asked, strict=True):
        check(vector(collector), OWN["mean"](states(tiny_model(), prompt)))
    assert isinstance(text.wait(), Done)


@pytest.mark.slow
def test_a_streamed_encoder_gives_the_same(accelerators: None) -> None:
    streamed = encoder_core(dispatch_model(encoder(), {"": "cpu"}, main_device="virtual:0"))
    asked = [ask(streamed, prompt, "mean") for prompt in PROMPTS]
    run(streamed)
    for prompt, collector in zip(PROMPTS, asked, strict=True):
        check(vector(collector), OWN["mean"](states(encoder(), prompt)))


def test_a_vector_that_is_no_number_fails_its_request_alone() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    shared = core(model)
    broken, whole = ask(shared, [9, 1], "mean"), ask(shared, [1, 2], "mean")
    run(shared)
    assert isinstance(broken.wait(), Failed)
    assert isinstance(whole.wait(), Done)


# --- encoders -----------------------------------------------------------------------------------------


def encoder_core(model: Any, **options: Any) -> EngineCore:
    options = {"kv_bytes": 1 << 20, "max_sequences": 3, "max_batch_tokens": 67, **options}
    return build_engine(model, pair_tokenizer(), options=EngineOptions(**options)).core


@pytest.mark.slow
def test_encoders_compute_whole_texts() -> None:
    made = encoder_core(encoder())
    assert not made.generates
    for kind in ("mean", "cls"):
        asked = [ask(made, prompt, kind) for prompt in PROMPTS]
        run(made)
        for prompt, collector in zip(PROMPTS, asked, strict=True):
            check(vector(collector), OWN[kind](states(encoder(), prompt)))


def test_classifiers_score_pairs_with_their_token_types() -> None:
    model = cross_encoder()
    made = encoder_core(model)
    types = [(0, 0, 1, 1, 1), None, (0,) * 20 + (1,) * 20, (0, 1, 1)]
    asked = [ask(made, prompt, "score", each) for prompt, each in zip(PROMPTS, types, strict=True)]
    run(made)
    for prompt, each, collector in zip(PROMPTS, types, asked, strict=True):
        with torch.no_grad():
            own = model(
                input_ids=torch.tensor([prompt]), token_type_ids=torch.tensor([each or [0] * len(prompt)])
            ).logits[0]
        check(vector(collector), own)
