"""An engine whose older pages are on disk: it keeps to its budgets, has the tokens of one without, and a disk that
fails ends only the requests that need it."""

from __future__ import annotations

import errno
import gc
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.dispatch.transfer.files import SourceFile
from bigmodel.errors import ServeError
from bigmodel.limits import KV_PAGE, KV_SPARE_PAGES
from bigmodel.plan import Plan
from bigmodel.server import Loaded
from bigmodel.server.engine import Done, Engine, EngineOptions, Failed, build_engine
from bigmodel.server.http.status import devices
from bigmodel.server.loading import PlannedModel, load
from bigmodel.server.models.running import RunningModel
from tests.server.tiny import Collector, ask, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.usefixtures("accelerators"), pytest.mark.slow]

CONTEXT, SEQUENCES = 1024, 2
SHAPES: Any = {"context_length": CONTEXT, "batch_size": SEQUENCES, "padded": False, "prefill_chunk_size": 128}
LONG, OTHER, SHORT = "the cat sat on the mat " * 58, "a dog ran over the hill " * 48, "the cat slept"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    sizes = {"num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
    tiny_model(**sizes, max_position_embeddings=CONTEXT).save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


_whole: list[list[int]] = []


@pytest.fixture
def whole(folder: Path) -> list[list[int]]:
    """The tokens with everything in the accelerator's memory."""
    if not _whole:
        placed = load(str(folder), max_memory={0: "512MiB", "cpu": "1GiB"}, **SHAPES)
        assert not placed.plan.kv_on_host
        _whole.extend(each.tokens() for each in answers(built(placed)))
    return _whole


@cache
def planned(folder: Path) -> Plan:
    """The plan where the accelerator holds the keys and values of few layers, and RAM three quarters of the others'."""
    model = PlannedModel(str(folder), SHAPES)
    resident = model.plan({0: 512 << 20, "cpu": 1 << 30}).devices[0]
    budget = int(resident.total - 0.6 * resident.kv_cache)
    host = model.plan({0: budget, "cpu": 1 << 30}).devices["cpu"]
    return model.plan({0: budget, "cpu": int(host.total - 0.25 * host.kv_cache)})


def loaded(folder: Path, there: Path) -> Loaded:
    """The model by that plan."""
    return load(str(folder), device_map=planned(folder), offload_folder=str(there), **SHAPES)


def built(placed: Loaded) -> Engine:
    options = EngineOptions(row_multiple=8, max_sequences=SEQUENCES, prefix_cache=False)
    return build_engine(placed.model, placed.tokenizer, placed.plan, options)


def answers(engine: Engine) -> list[Collector]:
    engine.start()
    found = asked(engine, LONG, OTHER, SHORT)
    engine.stop()
    return found


def asked(engine: Engine, *prompts: str) -> list[Collector]:
    """The answers of all of them, once they have ended."""
    found = [ask(engine, prompt, max_tokens=5, ignore_eos=True, temperature=0.0) for prompt in prompts]
    for each in found:
        each.wait()
    return found


@pytest.mark.long
def test_tokens_are_those_with_all_on_the_accelerator_and_all_budgets_hold(
    folder: Path, whole: list[list[int]], tmp_path: Path
) -> None:
    placed = loaded(folder, tmp_path)
    made = built(placed)
    assert made.pages is not None
    tiers = made.pages.tiers
    assert tiers is not None
    gc.collect()
    reset_peak_memory(0)
    seen: list[int] = []
    note = tiers.prepare
    tiers.prepare = lambda *args: (note(*args), seen.append(tiers.older.disk.space))[0]  # type: ignore[method-assign]
    assert [each.tokens() for each in answers(made)] == whole
    entries = placed.plan.devices
    assert max_memory_allocated(0) <= entries[0].total <= entries[0].budget
    assert 0 < max(seen) <= entries["disk"].kv_cache
    assert made.pages.nbytes <= entries["cpu"].kv_cache
    assert made.core.scheduler.pool.capacity == SEQUENCES * CONTEXT
    moved = placed.model.dispatch_stats()["kv"]
    assert moved["bytes_from_disk"] > 0
    assert moved["held_in_ram"] == made.pages.nbytes
    assert not [name for name in os.listdir(tmp_path) if "safetensors" not in name and ".dat" not in name]


def test_memory_of_each_tier_is_shown(folder: Path, tmp_path: Path) -> None:
    placed = loaded(folder, tmp_path)
    made = built(placed)
    running = RunningModel("tiny", made.core.codec, made, placed.model, placed.plan)
    shown = {entry["device"]: entry for entry in devices(running, {})}
    page = KV_PAGE * made.kv_bytes_per_token["cpu"]
    frames = placed.plan.devices["cpu"].kv_cache // page
    assert shown["cpu"]["kv_capacity"] == frames * page
    assert shown["disk"]["kv_capacity"] == (SEQUENCES * CONTEXT // KV_PAGE - frames + KV_SPARE_PAGES) * page
    assert shown["disk"]["kv_used"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "why"), [("read", os.strerror(errno.EIO)), ("written", os.strerror(errno.ENOSPC))]
)
def test_a_disk_that_fails_ends_the_requests_that_need_it_with_one_line(
    operation: str,
    why: str,
    folder: Path,
    whole: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = built(loaded(folder, tmp_path))
    right = os.preadv

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, why)

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if str(tmp_path) not in os.readlink(f"/proc/self/fd/{descriptor}"):
            return right(descriptor, buffers, offset)
        raise OSError(errno.EIO, why)

    if operation == "written":
        monkeypatch.setattr(os, "pwrite", full)
    else:
        monkeypatch.setattr(SourceFile, "view_cached", lambda *_: None)
        monkeypatch.setattr(os, "preadv", preadv)
    made.start()
    with caplog.at_level(logging.WARNING):
        ended = asked(made, LONG, OTHER, SHORT)
    monkeypatch.undo()
    assert asked(made, LONG)[0].tokens() == whole[0], "the engine goes on"
    made.stop()
    last = [each.events[-1] for each in ended]
    assert isinstance(last[2], Done)
    assert ended[2].tokens() == whole[2]
    failed = [each for each in last if isinstance(each, Failed)]
    assert failed
    assert all(each.message == f"keys and values cannot be kept on disk: {why}" for each in failed)
    about = [record for record in caplog.records if record.name.startswith("bigmodel.server.engine")]
    assert all(record.exc_info is None and "\n" not in record.getMessage() for record in about)
    assert any(f"cannot be {operation}" in record.getMessage() for record in about)
    assert made.core.scheduler.pool.used == 0
    for each, tokens in zip(ended[:2], whole, strict=False):
        assert isinstance(each.events[-1], Failed) or each.tokens() == tokens


def test_more_sequences_than_ram_has_pages_for_are_refused(folder: Path, tmp_path: Path) -> None:
    placed = loaded(folder, tmp_path)
    with pytest.raises(ServeError, match="RAM has memory for keys and values of"):
        build_engine(placed.model, placed.tokenizer, placed.plan, EngineOptions(row_multiple=8, max_sequences=64))
