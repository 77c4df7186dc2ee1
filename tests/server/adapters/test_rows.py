"""Requests with adapters have the tokens of peft's model, alone and beside requests with others or with none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.dispatch import dispatch_model
from bigmodel.errors import ServeError
from bigmodel.plan import plan
from bigmodel.server.adapters.files import Adapter, LowRank, adapters_bytes, read_adapter
from bigmodel.server.adapters.rows import Adapters, Rows
from bigmodel.server.engine import Engine, EngineOptions, build_engine
from bigmodel.server.engine.compute.plain import PlainRunner
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from tests.server import oracle
from tests.server.adapters.trained import adapted, write_adapter
from tests.server.tiny import Collector, make_request, tiny_model, tiny_tokenizer

PROMPTS = {
    "": list(range(40, 60)),
    "legal": [token % 200 for token in range(10, 10 + 3 * PROMPT_BLOCK)],
    "terse": [3, 1, 4, 1, 5, 9, 2, 6],
}
"""A prompt for the model itself, and one for each adapter."""

LAYERS = 3
"""Of the model that is streamed in part."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "legal": write_adapter(tiny_model(), folder / "legal", seed=1),
        "terse": write_adapter(tiny_model(), folder / "terse", seed=2, rank=2, target_modules=["k_proj", "gate_proj"]),
    }


@contextmanager
def serving(folders: dict[str, Path], model: Any = None, **options: Any) -> Iterator[Engine]:
    adapters = [read_adapter(name, folder) for name, folder in folders.items()]
    limits = EngineOptions(**{"kv_bytes": 64 << 20, "max_sequences": 8, **options})
    engine = build_engine(model or tiny_model(), tiny_tokenizer(), options=limits, adapters=adapters)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def ask(engine: Engine, adapter: str, prompt: list[int] | None = None) -> Collector:
    given = PROMPTS[adapter] if prompt is None else prompt
    request = replace(make_request(given, temperature=0.0, max_tokens=4, ignore_eos=True), adapter=adapter)
    collector = request.sink
    assert isinstance(collector, Collector)
    engine.submit(request)
    return collector


def answer(engine: Engine, adapter: str, prompt: list[int] | None = None) -> list[int]:
    collector = ask(engine, adapter, prompt)
    collector.wait()
    return collector.tokens()


def expected(folders: dict[str, Path], adapter: str, prompt: list[int] | None = None) -> list[int]:
    model = adapted(tiny_model(), folders[adapter]) if adapter else tiny_model()
    greedy = make_request([1], temperature=0.0, max_tokens=4, ignore_eos=True).params
    return oracle.generate(model, tiny_tokenizer(), PROMPTS[adapter] if prompt is None else prompt, greedy)


@pytest.mark.slow
def test_tokens_are_those_of_pefts_model(folders: dict[str, Path]) -> None:
    with serving(folders) as engine:
        found = {name: answer(engine, name) for name in PROMPTS}
    assert found == {name: expected(folders, name) for name in PROMPTS}
    assert expected(folders, "legal") != expected(folders, "", PROMPTS["legal"]), "the adapter changes nothing"


@pytest.mark.slow
def test_a_batch_of_several_adapters_gives_the_tokens_of_each_alone(folders: dict[str, Path]) -> None:
    with serving(folders) as engine:
        alone = {name: answer(engine, name) for name in PROMPTS}
        collectors = [(name, ask(engine, name)) for name in [*PROMPTS, *reversed(PROMPTS)]]
        for name, collector in collectors:
            collector.wait()
            assert collector.tokens() == alone[name]


@pytest.mark.slow
def test_prompts_are_cached_for_each_adapter_apart(folders: dict[str, Path]) -> None:
    prompt = PROMPTS["legal"]
    with serving(folders) as engine:
        first = [answer(engine, name, prompt) for name in ("", "legal", "terse")]
        prefix = engine.core.scheduler.prefix
        assert prefix.hits == 0
        assert [answer(engine, name, prompt) for name in ("", "legal", "terse")] == first
        assert prefix.hits == 3 * 2 * PROMPT_BLOCK
    assert first == [expected(folders, name, prompt) for name in ("", "legal", "terse")]


@pytest.mark.slow
def test_sequences_that_are_computed_one_by_one_have_adapters_too(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bigmodel.server.engine.build.choose_runner", lambda model, **options: PlainRunner(model, cached=True)
    )
    with serving(folders) as engine:
        assert engine.core.runner.name == "plain"
        assert {name: answer(engine, name) for name in PROMPTS} == {name: expected(folders, name) for name in PROMPTS}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_streamed_model_keeps_to_its_budget_with_adapters(folders: dict[str, Path], share: float) -> None:
    model = tiny_model(layers=LAYERS)
    wide = {name: write_adapter(model, folder.with_name(f"{name}-8"), seed=3) for name, folder in folders.items()}
    read = [read_adapter(name, folder) for name, folder in wide.items()]
    whole = plan(model, {0: "1GB", "cpu": "1GB"}, context_length=64, batch_size=4).devices[0].total
    budget = int(whole * share) + adapters_bytes(read)
    made = plan(model, {0: budget - adapters_bytes(read), "cpu": "1GB"}, context_length=64, batch_size=4)
    placed = dispatch_model(tiny_model(layers=LAYERS), made)
    options = EngineOptions(max_sequences=4, max_length=64)
    engine = build_engine(placed, tiny_tokenizer(), made, options, adapters=read)
    reset_peak_memory("virtual:0")
    engine.start()
    try:
        found = {name: answer(engine, name, list(range(20))) for name in wide}
        peak = max_memory_allocated("virtual:0")
    finally:
        engine.stop()
    assert peak <= budget
    for name, folder in wide.items():
        assert found[name] == resident_answer(name, folder, options) == pefts_answer(folder)


@cache
def resident_answer(name: str, folder: Path, options: EngineOptions) -> list[int]:
    """What an engine over the resident model of `LAYERS` layers answers with an adapter."""
    resident = dispatch_model(tiny_model(layers=LAYERS), {"": 0}, force_hooks=True)
    limits = replace(options, kv_bytes=8 << 20)
    alone = build_engine(resident, tiny_tokenizer(), options=limits, adapters=[read_adapter(name, folder)])
    alone.start()
    try:
        return answer(alone, name, list(range(20)))
    finally:
        alone.stop()


@cache
def pefts_answer(folder: Path) -> list[int]:
    """What peft's model of `LAYERS` layers answers."""
    greedy = make_request([1], temperature=0.0, max_tokens=4, ignore_eos=True).params
    return oracle.generate(adapted(tiny_model(layers=LAYERS), folder), tiny_tokenizer(), list(range(20)), greedy)


@pytest.mark.slow
def test_gpt2s_layers_have_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": len(tiny_tokenizer()), "initializer_range": 0.2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    folder = write_adapter(model, tmp_path / "adapter", target_modules=["c_attn", "c_fc"])
    with serving({"legal": folder}, model) as engine:
        found = answer(engine, "legal")
    greedy = make_request([1], temperature=0.0, max_tokens=4, ignore_eos=True).params
    assert found == oracle.generate(adapted(model, folder), tiny_tokenizer(), PROMPTS["legal"], greedy)


def part(taken: int, given: int) -> LowRank:
    return LowRank(torch.zeros(2, taken), torch.zeros(given, 2), 1.0)


@pytest.mark.parametrize(
    ("module", "low_rank", "says"),
    [
        ("model.layers.7.mlp.down_proj", part(128, 64), "made for another model"),
        ("model.layers.0.mlp.down_proj", part(64, 128), "takes 128 values"),
        ("model.norm", part(64, 64), "LlamaRMSNorm"),
        ("lm_head", part(64, 261), "logits"),
    ],
)
def test_an_adapter_of_another_model_is_refused(module: str, low_rank: LowRank, says: str) -> None:
    model = tiny_model()
    with pytest.raises(ServeError, match=says) as caught:
        Adapters(model, [Adapter("legal", {module: low_rank})])
    assert "\n" not in str(caught.value)
    assert not any(each._forward_hooks for each in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_logits_are_bitwise_those_of_pefts_model(dtype: torch.dtype, stored: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(dtype=dtype)
    folder = write_adapter(model, tmp_path / "adapter", seed=1)
    weights = folder / "adapter_model.safetensors"
    save_file({key: tensor.to(stored) for key, tensor in load_file(weights).items()}, weights)
    peft = adapted(model, folder)
    adapters = Adapters(model, [read_adapter("legal", folder)])
    for length in (1, 20, 70):
        tokens = torch.arange(length)[None]
        with torch.no_grad(), adapters.step([Rows("legal", 0, length)]):
            assert torch.equal(model(tokens).logits, peft(tokens).logits)


@pytest.mark.slow
def test_two_sets_of_adapters_of_one_model_do_not_mix(folders: dict[str, Path]) -> None:
    model = tiny_model()
    read = [read_adapter("legal", folders["legal"])]
    tokens, rows = torch.arange(8)[None], [Rows("legal", 0, 8)]
    with torch.no_grad():
        first = Adapters(model, read)
        with first.step(rows):
            wanted = model(tokens).logits
        second = Adapters(model, read)
        with second.step(rows):
            assert torch.equal(model(tokens).logits, wanted)


def test_a_model_without_its_adapters_is_as_before(folders: dict[str, Path]) -> None:
    model = tiny_model()
    adapters = Adapters(model, [read_adapter("legal", folders["legal"])])
    assert any(module._forward_hooks for module in model.modules())
    adapters.remove()
    assert not any(module._forward_hooks for module in model.modules())
