"""Prompts of adapters that outlive the engine: found by what an adapter holds, whatever it is called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bigmodel.server import Loaded
from bigmodel.server.adapters.files import read_adapter
from bigmodel.server.engine import Done, Engine, EngineOptions, build_engine
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from bigmodel.server.engine.scheduling.request import SamplingParams
from bigmodel.server.loading import load
from tests.server import oracle
from tests.server.adapters.trained import adapted, write_adapter
from tests.server.tiny import Collector, make_request, tiny_model, tiny_tokenizer

B = PROMPT_BLOCK
PROMPT = [7 * n % 250 for n in range(3 * B + 9)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return load(str(folder), max_memory={"cpu": "1GiB"}, batch_size=1, context_length=6 * B)


@pytest.fixture
def legal(tmp_path: Path) -> Path:
    return write_adapter(tiny_model(), tmp_path / "legal", seed=1, alpha_pattern={"q_proj": 8})


def ask(engine: Engine, name: str) -> tuple[list[int], int]:
    """Tokens of an answer, and how many tokens of its prompt came from the cache."""
    request = make_request(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True)
    request.adapter = name
    collector = request.sink
    assert isinstance(collector, Collector)
    engine.submit(request)
    done = collector.wait()
    assert isinstance(done, Done)
    return collector.tokens(), done.cached_tokens


def started(loaded: Loaded, cache: Path, adapters: dict[str, Path]) -> Engine:
    engine = build_engine(
        loaded.model,
        loaded.tokenizer,
        loaded.plan,
        EngineOptions(max_sequences=2, prefix_folder=cache),
        checkpoint=loaded.checkpoint,
        adapters=[read_adapter(*each) for each in adapters.items()],
    )
    engine.start()
    return engine


def stop(engine: Engine) -> None:
    engine.stop()
    assert engine.core.runner.adapters is not None
    engine.core.runner.adapters.remove()


def answer(loaded: Loaded, cache: Path, adapters: dict[str, Path], name: str) -> tuple[list[int], int, Engine]:
    """As `ask`, of a new engine."""
    engine = started(loaded, cache, adapters)
    try:
        return *ask(engine, name), engine
    finally:
        stop(engine)


def pefts(folder: Path) -> list[int]:
    """What peft's model answers."""
    return oracle.generate(adapted(tiny_model(), folder), tiny_tokenizer(), PROMPT, GREEDY)


@pytest.mark.slow
def test_a_new_engine_continues_an_adapters_prompt_under_any_name(loaded: Loaded, tmp_path: Path, legal: Path) -> None:
    wanted, cache = pefts(legal), tmp_path / "cache"
    assert answer(loaded, cache, {"legal": legal}, "legal")[:2] == (wanted, 0)
    assert answer(loaded, cache, {"legal": legal}, "legal")[:2] == (wanted, 3 * B)
    renamed = shutil.copytree(legal, tmp_path / "copied")
    tokens, cached, engine = answer(loaded, cache, {"other": renamed}, "other")
    assert (tokens, cached) == (wanted, 3 * B)
    files = engine.core.scheduler.prefix.files
    assert files is not None
    assert (files.restored, files.written, files.refused) == (3 * B, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("edit", ["weights", "settings", "none"])
def test_what_another_adapter_computed_is_not_used(loaded: Loaded, tmp_path: Path, legal: Path, edit: str) -> None:
    """Another one under the same name, an edited one, and the model itself."""
    cache = tmp_path / "cache"
    first = answer(loaded, cache, {"legal": legal}, "legal")[0]
    if edit == "weights":
        write_adapter(tiny_model(), legal, seed=2)
    elif edit == "settings":
        path = legal / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 64}))
    tokens, cached, _ = answer(loaded, cache, {"legal": legal}, "" if edit == "none" else "legal")
    wanted = oracle.generate(tiny_model(), tiny_tokenizer(), PROMPT, GREEDY) if edit == "none" else pefts(legal)
    assert (tokens, cached) == (wanted, 0)
    assert tokens != first


@pytest.mark.slow
def test_a_torn_file_of_an_adapter_is_computed_again(loaded: Loaded, tmp_path: Path, legal: Path) -> None:
    cache = tmp_path / "cache"
    wanted = answer(loaded, cache, {"legal": legal}, "legal")[0]
    by_age = sorted(cache.rglob("*.safetensors"), key=lambda path: -path.stat().st_mtime_ns)
    assert len(by_age) == 3
    by_age[1].write_bytes(by_age[1].read_bytes()[:-1])
    tokens, cached, engine = answer(loaded, cache, {"legal": legal}, "legal")
    assert (tokens, cached) == (wanted, B)
    files = engine.core.scheduler.prefix.files
    assert files is not None
    assert files.refused == 1
    assert answer(loaded, cache, {"legal": legal}, "legal")[:2] == (wanted, 3 * B)


@pytest.mark.slow
def test_blocks_that_were_read_stay_in_memory_for_their_adapter_alone(
    loaded: Loaded, tmp_path: Path, legal: Path
) -> None:
    cache = tmp_path / "cache"
    wanted = {"legal": answer(loaded, cache, {"legal": legal}, "legal")[0]}
    wanted[""] = oracle.generate(tiny_model(), tiny_tokenizer(), PROMPT, GREEDY)
    engine = started(loaded, cache, {"legal": legal})
    try:
        assert ask(engine, "legal") == (wanted["legal"], 3 * B)
        assert ask(engine, "") == (wanted[""], 0)
        assert ask(engine, "legal") == (wanted["legal"], 3 * B)
    finally:
        stop(engine)
    files = engine.core.scheduler.prefix.files
    assert files is not None
    assert files.restored == 3 * B  # once: the last one found them in memory
