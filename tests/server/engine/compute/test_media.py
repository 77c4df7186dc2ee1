"""Prompts with images give the tokens of transformers' own generate, beside any other requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigmodel.server.engine import Engine, EngineOptions, Request, SamplingParams, build_engine
from tests.examples import alike
from tests.server.tiny import Collector, make_request
from tests.server.vision import IMAGE, generated, picture, processor, tiny_llava
from tests.server.vision_kinds import KINDS, VisionKind, built


def inputs_of(text: str, *seeds: int) -> Any:
    return processor()(text=text, images=[picture(seed) for seed in seeds], return_tensors="pt")


def asked(inputs: Any, tokens: int, **params: Any) -> Request:
    ids = inputs["input_ids"][0].tolist()
    media = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    given = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **params)
    return Request(f"image {torch.rand(1).item()}", ids, given, Collector(), media=media)


def answered(engine: Engine, requests: list[Request]) -> list[list[int]]:
    collectors = [request.sink for request in requests]
    for request in requests:
        engine.submit(request)
    for collector in collectors:
        assert isinstance(collector, Collector)
        collector.wait()
    return [collector.tokens() for collector in collectors if isinstance(collector, Collector)]


def engine_of(model: Any, **options: Any) -> Engine:
    engine = build_engine(
        model, processor().tokenizer, options=EngineOptions(kv_bytes=8 << 20, max_sequences=8, **options)
    )
    engine.start()
    return engine


PROMPTS = [(f"see {IMAGE} it", (1,)), (f"see {IMAGE} it", (2,)), (f"{IMAGE} and {IMAGE} then " + "q" * 150, (3, 4))]


@pytest.mark.slow
def test_images_give_the_tokens_of_transformers_beside_texts() -> None:
    model = tiny_llava()
    given = [inputs_of(text, *seeds) for text, seeds in PROMPTS]
    expected = [generated(model, inputs, 24) for inputs in given]
    assert expected[0] != expected[1]  # the same text about another image
    texts = [make_request("x" * length, max_tokens=24, temperature=0.0, ignore_eos=True) for length in (3, 127)]
    engine = engine_of(model)
    alone = answered(engine, texts)
    engine.core.scheduler.prefix.hits = 0
    texts = [make_request("x" * length, max_tokens=24, temperature=0.0, ignore_eos=True) for length in (3, 127)]
    together = answered(engine, [asked(given[0], 24), texts[0], asked(given[1], 24), texts[1], asked(given[2], 24)])
    engine.stop()
    assert [together[0], together[2], together[4]] == expected
    assert [together[1], together[3]] == alone
    assert engine.core.scheduler.prefix.hits == 0  # of the second image's prompt, which has the first one's tokens


@pytest.mark.slow
def test_an_image_that_gave_way_goes_on_where_it_was() -> None:
    model = tiny_llava()
    inputs = inputs_of(*PROMPTS[0][:1], *PROMPTS[0][1])
    expected = generated(model, inputs, 12)
    engine = engine_of(model)
    engine.stop()
    request = asked(inputs, 12)
    engine.core.add(request)
    for _ in range(5):
        engine.core.step()
    engine.core.scheduler._preempt(request.sequences[0])
    while engine.core.step():
        pass
    assert isinstance(request.sink, Collector)
    request.sink.wait()
    assert request.sink.tokens() == expected


@pytest.mark.slow
def test_several_answers_to_an_image() -> None:
    model = tiny_llava()
    inputs = inputs_of(*PROMPTS[0][:1], *PROMPTS[0][1])
    request = asked(inputs, 8)
    request = Request("several", request.prompt, request.params, Collector(), n=2, media=request.media)
    engine = engine_of(model)
    answered(engine, [request])
    engine.stop()
    expected = generated(model, inputs, 8)
    assert [sequence.output for sequence in request.sequences] == [expected] * 2


@pytest.mark.slow
@alike("kind", sorted(KINDS, key=lambda kind: kind.name != "idefics3"), 1, ids=repr)
def test_models_of_other_kinds_give_the_tokens_of_transformers(kind: VisionKind) -> None:
    making = kind.processor()
    model = built(kind, making.tokenizer)
    sizes = ((40, 30), (16, 48), (12, 12))
    texts = [f"see {kind.image} it", f"see {kind.image} it", f"{kind.image} and {kind.image} then " + "q" * 140]
    shown = [[picture(1, sizes[0])], [picture(2, sizes[1])], [picture(3, sizes[2]), picture(4, sizes[0])]]
    given = [making(text=text, images=images, return_tensors="pt") for text, images in zip(texts, shown, strict=True)]
    expected = [generated(model, inputs, 12) for inputs in given]
    assert expected[0] != expected[1]  # the same text about another image
    words = [make_request("x" * length, max_tokens=12, temperature=0.0, ignore_eos=True) for length in (3, 127)]
    plain = [
        generated(
            model, {"input_ids": torch.tensor([each.prompt]), "attention_mask": torch.ones(1, len(each.prompt))}, 12
        )
        for each in words
    ]
    engine = build_engine(model, making.tokenizer, options=EngineOptions(kv_bytes=8 << 20, max_sequences=8))
    engine.start()
    together = answered(engine, [asked(given[0], 12), words[0], asked(given[1], 12), words[1], asked(given[2], 12)])
    engine.stop()
    assert [together[0], together[2], together[4]] == expected
    assert [together[1], together[3]] == plain
