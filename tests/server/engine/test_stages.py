"""Several steps in flight through stages: each request has the tokens it has alone, and what fails is one's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, virtual
from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.errors import ServeError
from bigmodel.plan import Plan, plan
from bigmodel.server.adapters.files import read_adapter
from bigmodel.server.engine import Done, EngineOptions, Failed, Request, build_engine
from bigmodel.server.engine.compute.choose_runner import RunnerChoice
from bigmodel.server.engine.core import EngineCore
from tests.server import oracle
from tests.server.adapters.trained import adapted, write_adapter
from tests.server.tiny import Collector, make_request, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.virtual_only("several accelerators"), pytest.mark.usefixtures("accelerators")]

GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_p": 0.9}
SHOWN: dict[str, Any] = {"temperature": 0, "logprobs": 2, "prompt_logprobs": True}
TEXTS = ("the cat", "in the", "then", "a cat in the inn", "the", "thin", "in", "cat")


def stages(devices: tuple[int, ...] = (0, 1), head: int = 1, model: Any = None) -> Any:
    """A model whose layers are resident on these accelerators; what comes before them and after is on others, too."""
    places = {"model.embed_tokens": "virtual:1", "model.rotary_emb": "virtual:1", "model.norm": f"virtual:{head}"}
    places |= {f"model.layers.{index}": f"virtual:{device}" for index, device in enumerate(devices)}
    made = tiny_model(layers=len(devices)) if model is None else model
    return dispatch_model(made, {**places, "lm_head": f"virtual:{head}"}, main_device="virtual:1")


def core(model: Any, steps: int | None = 3, made: Plan | None = None, **options: Any) -> EngineCore:
    options = {"kv_bytes": 4 << 20, "max_sequences": 8, "prefix_cache": False, "row_multiple": 1, **options}
    adapters = options.pop("adapters", ())
    options["steps_in_flight"] = steps
    placed = repr(model.config), repr(model.hf_device_map), options["row_multiple"]
    engine = build_engine(
        model, tiny_tokenizer(), made, EngineOptions(**options), adapters=adapters, known_runner=_chosen.get(placed)
    )
    _chosen[placed] = RunnerChoice.of(engine.core.runner)
    return engine.core


_chosen: dict[tuple[object, ...], RunnerChoice] = {}
"""The runner of each placement of the tiny model: the first engine over it finds it by forwards."""


def ask(
    engine: EngineCore, *params: dict[str, Any], texts: tuple[str, ...] = TEXTS[:6], tokens: int = 3
) -> list[Request]:
    """Requests for a text each, with these parameters in turns."""
    asked = [
        make_request(text, **{"ignore_eos": True, "max_tokens": tokens, **params[number % len(params)]})
        for number, text in enumerate(texts)
    ]
    for request in asked:
        engine.add(request)
    return asked


def run(engine: EngineCore) -> int:
    """Step until all is done; the most steps that were in flight at once."""
    most = 0
    while not engine.idle:
        assert engine.step()
        most = max(most, engine.steps_now)
    return most + 1  # another was launched before one of them landed


def sink(request: Request) -> Collector:
    inner: Any = request.sink
    assert isinstance(inner, Collector)
    return inner


def ends(asked: list[Request]) -> list[tuple[Any, list[int]]]:
    return [(sink(request).wait(), sink(request).tokens()) for request in asked]


def alone(asked: list[Request], layers: int = 2) -> list[list[int]]:
    """The tokens of each, from the model that was never dispatched."""
    found = []
    for request in asked:
        key = layers, tuple(request.prompt), repr(request.params)
        if key not in _alone:
            _alone[key] = oracle.generate(_model(layers), tiny_tokenizer(), request.prompt, request.params)
        found.append(_alone[key])
    return found


_alone: dict[tuple[object, ...], list[int]] = {}
"""What `alone` has found: most tests ask for the same texts."""


@cache
def _model(layers: int) -> Any:
    return tiny_model(layers=layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [pytest.param(None, id="late"), pytest.param(1, id="at random", marks=pytest.mark.long)],
)
def test_requests_have_the_tokens_they_have_alone_however_late_work_is_done(seed: int | None) -> None:
    virtual.enable(count=2, strict=True, seed=seed, late_compute=True)
    engine = core(stages())
    asked = ask(engine, GREEDY, DRAWN, SHOWN)
    assert run(engine) == 3
    assert [tokens for _, tokens in ends(asked)] == alone(asked)
    assert engine.scheduler.pool.used == 0


@pytest.mark.slow
def test_logits_are_those_of_one_step_at_a_time_bit_for_bit() -> None:
    shown = []
    for steps in (1, 3):
        engine = core(stages(), steps, row_multiple="auto")
        asked = ask(engine, SHOWN)
        assert run(engine) == steps
        shown.append([sink(request).wait() and sink(request).events for request in asked])
    one, several = shown
    assert [_logprobs(events) for events in one] == [_logprobs(events) for events in several]


def _logprobs(events: list[Any]) -> list[Any]:
    return [each for event in events for each in getattr(event, "logprobs", ())]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (1, 0, 0, 1)], ids=str)
def test_stages_may_be_in_any_order(devices: tuple[int, ...]) -> None:
    virtual.enable(count=4, strict=True, late_compute=True)
    engine = core(stages(devices, head=0), 5)
    asked = ask(engine, GREEDY, tokens=2)
    assert run(engine) == 5
    assert [tokens for _, tokens in ends(asked)] == alone(asked, layers=4)


@pytest.mark.slow
def test_the_host_waits_for_no_step_before_it_lands() -> None:
    virtual.enable(count=2, strict=True, late_compute=True)
    engine = core(stages(), 3)
    ask(engine, GREEDY, tokens=6)
    while engine.steps < 8:
        engine.step()
    for _ in range(6):
        before, steps = virtual.host_waits(), engine.steps
        engine.step()
        # The step itself, and its tokens, which are there by then.
        landed = engine.steps - steps
        assert virtual.host_waits().since(before) == (0, 0, 2 * landed)
    run(engine)


@pytest.mark.slow
def test_long_prompts_and_prefixes_that_are_shared() -> None:
    virtual.enable(count=2, strict=True, late_compute=True)
    engine = core(stages(), prefix_cache=True)
    texts = tuple("in the cat " * 30 + text for text in TEXTS[:2])
    for cached in (False, True):
        asked = ask(engine, GREEDY, DRAWN, texts=texts, tokens=3)
        run(engine)
        found = ends(asked)
        assert [tokens for _, tokens in found] == alone(asked)
        assert all(end.cached_tokens > 0 for end, _ in found) or not cached


@pytest.mark.long
@pytest.mark.slow
def test_sequences_are_preempted_and_go_on() -> None:
    virtual.enable(count=2, strict=True, late_compute=True)
    per_token = 2 * 2 * 2 * 16 * 4
    engine = core(stages(), kv_bytes=5 * 128 * per_token // 2 + 1, max_length=256)
    texts = tuple("in the cat " * 17 + text for text in TEXTS[:5])
    asked = ask(engine, GREEDY, texts=texts, tokens=8)
    run(engine)
    assert engine.scheduler.preemptions > 0
    assert [tokens for _, tokens in ends(asked)] == alone(asked)
    assert engine.scheduler.pool.used == 0


@pytest.mark.slow
def test_adapters_are_added_to_the_rows_of_their_own(tmp_path: Path) -> None:
    virtual.enable(count=2, strict=True, late_compute=True)
    write_adapter(tiny_model(), tmp_path / "legal", seed=1)
    engine = core(stages(), adapters=[read_adapter("legal", tmp_path / "legal")])
    asked = ask(engine, GREEDY)
    for request in asked[::2]:
        request.adapter = "legal"
    run(engine)
    found, plain = [tokens for _, tokens in ends(asked)], alone(asked)
    assert found[1::2] == plain[1::2]
    trained = adapted(tiny_model(), tmp_path / "legal")
    assert found[::2] == [
        oracle.generate(trained, tiny_tokenizer(), request.prompt, request.params) for request in asked[::2]
    ]


@pytest.mark.slow
def test_a_cancelled_request_keeps_its_memory_until_its_step_has_landed() -> None:
    virtual.enable(count=2, strict=True, late_compute=True)
    engine = core(stages())
    asked = ask(engine, GREEDY, tokens=5)
    while engine.steps < 6:
        engine.step()
    flying = next(request for request in asked if request.sequences[0].in_flight)
    used = engine.scheduler.pool.used
    engine.fail(flying, "cancelled", "nobody waits")
    assert sink(flying).wait() == Failed("cancelled", "nobody waits")
    assert engine.scheduler.pool.used == used
    run(engine)
    assert engine.scheduler.pool.used == 0
    others = [request for request in asked if request is not flying]
    assert [tokens for _, tokens in ends(others)] == alone(others)


@pytest.mark.slow
def test_a_closed_engine_has_no_step_in_flight() -> None:
    virtual.enable(count=2, strict=True, late_compute=True)
    engine = core(stages())
    asked = ask(engine, GREEDY, tokens=10)
    while engine.steps < 6:
        engine.step()
    for request in asked:
        engine.fail(request, "engine", "it was stopped")
    assert not engine.idle
    engine.close()
    assert engine.idle
    assert engine.scheduler.pool.used == 0


@pytest.mark.slow
def test_an_error_in_the_step_of_one_fails_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core(stages())
    asked = ask(engine, GREEDY)
    victim = asked[2].sequences[0]
    compute = engine.runner.run

    def failing(batch: Any) -> Any:
        if victim in [scheduled.sequence for scheduled in batch] and len(victim.output) == 2:
            raise RuntimeError("secret")
        return compute(batch)

    monkeypatch.setattr(engine.runner, "run", failing)
    run(engine)
    found = ends(asked)
    assert found[2][0] == Failed("engine", "computing a step failed: RuntimeError")
    others = asked[:2] + asked[3:]
    assert [tokens for end, tokens in found if isinstance(end, Done)] == alone(others)
    assert engine.scheduler.pool.used == 0


@pytest.mark.slow
def test_an_operation_that_fails_after_its_launch_fails_the_requests_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bigmodel.dispatch.transfer.stages import StageStep

    engine = core(stages())
    asked = ask(engine, GREEDY)
    land, landings = StageStep.land, iter(range(1000))

    def failing(step: StageStep) -> None:
        land(step)
        if next(landings) == 4:
            raise RuntimeError("an operation failed after it had been launched")

    monkeypatch.setattr(StageStep, "land", failing)
    run(engine)
    found = ends(asked)
    failed = [number for number, (end, _) in enumerate(found) if isinstance(end, Failed)]
    assert 0 < len(failed) < len(asked)
    others = [request for number, request in enumerate(asked) if number not in failed]
    assert [tokens for end, tokens in found if isinstance(end, Done)] == alone(others)
    assert engine.scheduler.pool.used == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.long), 4])
def test_peaks_stay_within_the_plan(count: int) -> None:
    virtual.enable(count)
    others = [memory_allocated(f"virtual:{index}") for index in range(count)]  # of other tests
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512}
    model = tiny_model(layers=4, **shape)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budgets: dict[Any, Any] = {**dict.fromkeys(range(count), weights + 2**26), "cpu": "1GB"}
    made = plan(model, budgets, "balanced", batch_size=6, context_length=128, prefill_chunk_size=64)
    assert made.stages is not None
    engine = core(dispatch_model(model, made), count + 1, made, kv_bytes=None, max_sequences=6, prefix_cache=True)
    for index in range(count):
        reset_peak_memory(f"virtual:{index}")
    asked = ask(engine, GREEDY, DRAWN, texts=tuple("in the cat " * 12 + text for text in TEXTS[:5]), tokens=2)
    assert run(engine) == count + 1
    twin = tiny_model(layers=4, **shape)
    for request, (_, tokens) in zip(asked, ends(asked), strict=True):
        assert tokens == oracle.generate(twin, tiny_tokenizer(), request.prompt, request.params)
    for index in range(count):
        device = made.devices[index]
        assert max_memory_allocated(f"virtual:{index}") - others[index] <= device.total <= device.budget


@pytest.mark.slow
def test_stages_are_timed() -> None:
    model = stages()
    assert "stages" not in model.dispatch_stats()
    engine = core(model)
    ask(engine, GREEDY)
    run(engine)
    figures = model.dispatch_stats()["stages"]
    assert figures.keys() == {"virtual:0", "virtual:1"}
    for each in figures.values():
        assert each["busy_seconds"] > 0
        assert 0 <= each["idle_share"] < 1


@pytest.mark.slow
def test_the_plan_decides_how_many_are_in_flight() -> None:
    engine = core(stages(), None)  # a given device map predicts nothing
    assert engine.in_flight is None
    assert core(stages(), 1).in_flight is None
    found = core(stages(), 4).in_flight
    assert found is not None
    assert (found.most, found.steps(1)) == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [({"prompt_lookup": 4}, "proposed tokens"), ({"draft_tokens": 1}, None)],
)
def test_what_does_not_go_together_is_named(options: dict[str, Any], why: str | None) -> None:
    if why is None:
        assert core(stages(), 2, **options).in_flight is not None
        return
    with pytest.raises(ServeError, match=why):
        core(stages(), 2, **options)
    assert core(stages(), None, **options).in_flight is None


@pytest.mark.slow
def test_a_model_on_one_device_has_no_stages() -> None:
    one = dispatch_model(tiny_model(), {"": "virtual:0"})
    found = dispatched(one)
    assert found is None or found.stages is None
    with pytest.raises(ServeError, match="several accelerators, with their keys and values"):
        core(one, 2)


@pytest.mark.slow
def test_workspaces_of_streams_need_room() -> None:
    virtual.enable(2, caching=virtual.Caching(workspace=8 << 20))
    model = tiny_model(layers=4)
    made = plan(model, {0: "40MiB", 1: "40MiB", "cpu": "1GB"}, "balanced", batch_size=4, context_length=128)
    assert len({part.runs_on for part in made.parts}) == 2
    dispatch_model(model, made)
    with pytest.raises(ServeError, match="workspaces"):
        core(model, 6, made, kv_bytes=None)
