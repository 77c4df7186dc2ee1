"""generate_batch: each prompt as if alone, and one fetch of a streamed block for all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigmodel.devices import max_memory_allocated, reset_peak_memory, virtual
from bigmodel.dispatch import dispatch_model
from bigmodel.errors import ServeError
from bigmodel.plan import plan
from bigmodel.server import Generation, generate_batch
from bigmodel.server.adapters.files import adapters_bytes, read_adapter
from bigmodel.server.batch import _leaving_room, generate_each
from bigmodel.server.engine import EngineOptions, SamplingParams

from .adapters.trained import adapted, write_adapter
from .oracle import generate as generate_slowly
from .tiny import make_request, tiny_model, tiny_tokenizer

PROMPTS = ["one", "a longer prompt than that", "the third", "and a last one"]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def generate(model: Any, prompts: list[str], params: Any = GREEDY, **options: Any) -> list[Generation]:
    return generate_batch(model, tiny_tokenizer(), prompts, params, options=EngineOptions(kv_bytes=2**20, **options))


@pytest.mark.slow
def test_each_prompt_gets_the_tokens_it_gets_alone() -> None:
    model = tiny_model()
    together = generate(model, PROMPTS)
    assert together == [generate(model, [prompt])[0] for prompt in PROMPTS]
    assert [len(answer.token_ids) for answer in together] == [6] * 4
    assert [answer.finish_reason for answer in together] == ["length"] * 4


@pytest.mark.slow
def test_more_prompts_than_slots_are_all_generated() -> None:
    seen: list[tuple[int, int]] = []
    options = EngineOptions(kv_bytes=2**20, max_sequences=2)
    answers = generate_batch(
        tiny_model(), tiny_tokenizer(), PROMPTS, GREEDY, options=options, on_step=lambda *done: seen.append(done)
    )
    assert answers == generate(tiny_model(), PROMPTS)
    assert seen[-1] == (4, 4)
    assert sorted(seen) == seen


def test_each_prompt_may_have_its_own_parameters() -> None:
    each = [SamplingParams(max_tokens=n, temperature=1.0, seed=n) for n in (1, 2, 3, 4)]
    answers = generate(tiny_model(), PROMPTS, each)
    assert [len(answer.token_ids) for answer in answers] == [1, 2, 3, 4]
    assert answers == generate(tiny_model(), PROMPTS, each)


@pytest.mark.slow
def test_prompts_may_be_tokens() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = tokenizer.encode("the third")
    assert generate_batch(model, tokenizer, [ids], GREEDY) == generate_batch(model, tokenizer, ["the third"], GREEDY)


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_one_fetch_of_a_streamed_block_serves_every_sequence() -> None:
    def fetches(prompts: list[str]) -> int:
        model = dispatch_model(tiny_model(), {"": 0, "model.layers": "cpu"})
        generate(model, prompts, replace(GREEDY, max_tokens=3))
        return int(model.dispatch_stats()["virtual:0"]["fetches"])

    fetches(["a prompt!"])  # finds how the model is run by a forward, which later engines over equal models know
    alone = fetches(["a prompt!"])
    assert alone > 0
    assert fetches(["a prompt!", "two of us", "and three", "then four"]) == alone


@pytest.mark.parametrize(
    ("prompts", "params", "why"),
    [
        ([""], GREEDY, "prompt 0 is empty"),
        (["a", "b" * 2000], GREEDY, "prompt 1 has 2000 tokens"),
        ([[1, 10**6]], GREEDY, "holds token 1000000"),
        (["a", "b"], [GREEDY], "2 prompts but 1 params"),
    ],
)
def test_invalid_prompts_are_refused_before_generation(prompts: Any, params: Any, why: str) -> None:
    with pytest.raises(ServeError, match=why):
        generate(tiny_model(), prompts, params)


def test_each_prompt_is_yielded_when_it_ends_and_errors_in_their_place() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    lengths = [9, 2, 5]
    asked: list[tuple[Any, SamplingParams]] = [
        (prompt, SamplingParams(length, temperature=0.0)) for prompt, length in zip(PROMPTS, lengths, strict=False)
    ]
    asked.insert(1, ("", GREEDY))
    options = EngineOptions(kv_bytes=2**20)
    found = list(generate_each(model, tokenizer, asked, options=options))
    assert [number for number, _ in found] == [1, 2, 3, 0]
    outcomes = dict(found)
    assert "prompt 1 is empty" in str(outcomes[1])
    for number in (0, 2, 3):
        alone = generate_batch(model, tokenizer, [asked[number][0]], asked[number][1], options=options)
        assert outcomes[number] == alone[0]


@pytest.mark.slow
def test_prompts_are_taken_as_there_is_room_for_them() -> None:
    taken: list[int] = []

    def prompts() -> Any:
        for number in range(20):
            taken.append(number)
            yield "the cat", GREEDY

    options = EngineOptions(kv_bytes=2**20, max_sequences=2)
    each = generate_each(tiny_model(), tiny_tokenizer(), prompts(), options=options)
    next(each)
    assert len(taken) <= 5
    assert len(list(each)) == 19


def test_a_prompt_whose_step_fails_is_an_error_and_not_an_empty_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from bigmodel.server.engine.core import EngineCore

    account = EngineCore._account

    def failing(core: Any, scheduled: Any, rows: Any) -> None:
        if scheduled.sequence.request.request_id == "1":
            raise RuntimeError("a planted failure")
        account(core, scheduled, rows)

    monkeypatch.setattr(EngineCore, "_account", failing)
    model, tokenizer = tiny_model(), tiny_tokenizer()
    options = EngineOptions(kv_bytes=2**20)
    found = dict(generate_each(model, tokenizer, [(prompt, GREEDY) for prompt in PROMPTS], options=options))
    assert [isinstance(found[number], ServeError) for number in range(4)] == [False, True, False, False]
    with pytest.raises(ServeError, match="prompt 1: computing a step failed"):
        generate_batch(model, tokenizer, PROMPTS, GREEDY, options=options)


@pytest.mark.slow
@pytest.mark.virtual_only("several accelerators")
@pytest.mark.usefixtures("accelerators")
def test_steps_are_in_flight_where_layers_are_resident_on_several_accelerators() -> None:
    virtual.enable(2, strict=True, late_compute=True)
    places = {"model.embed_tokens": "virtual:0", "model.rotary_emb": "virtual:0", "model.layers.0": "virtual:0"}
    places |= {"model.layers.1": "virtual:1", "model.norm": "virtual:1", "lm_head": "virtual:1"}
    model = dispatch_model(tiny_model(), places)
    short = replace(GREEDY, max_tokens=3)
    one = generate(model, PROMPTS, short)
    assert "stages" not in model.dispatch_stats()
    assert generate(model, PROMPTS, short, steps_in_flight=3) == one
    assert model.dispatch_stats()["stages"].keys() == {"virtual:0", "virtual:1"}


def test_no_prompts_have_no_answers() -> None:
    assert generate(tiny_model(), []) == []


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(tiny_model(), folder / name, seed) for seed, name in enumerate(("legal", "terse"))}


def with_adapters(model: Any, adapters: dict[str, Path], adapter: Any = None, made: Any = None) -> list[Any]:
    options = EngineOptions(kv_bytes=2**20) if made is None else None
    given: dict[str, Any] = {"options": options, "plan": made, "adapters": adapters, "adapter": adapter}
    return [answer.token_ids for answer in generate_batch(model, tiny_tokenizer(), PROMPTS, GREEDY, **given)]


def pefts(adapters: dict[str, Path], names: list[str]) -> list[Any]:
    """What peft's models generate."""
    greedy = make_request([1], temperature=0.0, max_tokens=6).params
    tokenizer = tiny_tokenizer()
    models = {name: adapted(tiny_model(), adapters[name]) if name else tiny_model() for name in set(names)}
    return [
        tuple(generate_slowly(models[name], tokenizer, tokenizer.encode(prompt), greedy))
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]


@pytest.mark.slow
def test_each_prompt_may_have_its_own_adapter(adapters: dict[str, Path]) -> None:
    model = tiny_model()
    names = ["legal", "", "terse", "legal"]
    assert with_adapters(model, adapters, names) == pefts(adapters, names)
    assert not any(module._forward_hooks for module in model.modules())
    assert with_adapters(model, adapters, "terse") == pefts(adapters, ["terse"] * 4)
    assert with_adapters(model, {"legal": adapters["legal"]}) == pefts(adapters, ["legal"] * 4)


@pytest.mark.slow
def test_a_run_that_is_left_early_leaves_the_model_as_it_was(adapters: dict[str, Path]) -> None:
    model = tiny_model()
    read = [read_adapter("legal", adapters["legal"])]
    options = EngineOptions(kv_bytes=2**20)
    each = generate_each(model, tiny_tokenizer(), [("one", GREEDY, "legal")] * 3, options=options, adapters=read)
    next(each)
    assert any(module._forward_hooks for module in model.modules())
    each.close()  # type: ignore[attr-defined]  # a generator
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (None, "say which adapter computes the prompts: legal, terse"),
        ("x", "there is no adapter 'x'; there are legal, terse"),
        (["legal"], "4 prompts but 1 adapters"),
    ],
)
def test_prompts_without_their_adapter_are_refused(adapters: dict[str, Path], adapter: Any, says: str) -> None:
    with pytest.raises(ServeError, match=says):
        with_adapters(tiny_model(), adapters, adapter)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_adapters_have_their_part_of_the_budget_or_are_refused(adapters: dict[str, Path]) -> None:
    read = [read_adapter(name, folder) for name, folder in adapters.items()]
    taken = adapters_bytes(read)
    whole = plan(tiny_model(), {0: "1GB", "cpu": "1GB"}, context_length=64, batch_size=4).devices[0].total
    for room in (taken, taken - 1):
        budget = whole + room
        made = plan(tiny_model(), {0: budget, "cpu": "1GB"}, context_length=64, batch_size=4)
        placed = dispatch_model(tiny_model(), made)
        reset_peak_memory("virtual:0")
        if room < taken:
            with pytest.raises(ServeError, match=r"adapters take .* of device 0, and the model's plan leaves .*"):
                with_adapters(placed, adapters, "legal", made)
        else:
            assert [entry.budget for entry in _leaving_room(made, read).devices.values()] == [
                whole,
                (made.devices["cpu"].budget or 0) - taken,
            ]
            names = ["legal", "", "terse", "legal"]
            assert with_adapters(placed, adapters, names, made) == pefts(adapters, names)
            assert max_memory_allocated("virtual:0") <= budget
