"""Prompts' keys and values that outlive the engine: the same tokens, computed once."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bigmodel.errors import ServeError
from bigmodel.server import Loaded
from bigmodel.server.engine import Done, Engine, EngineOptions, build_engine
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from bigmodel.server.engine.scheduling.scheduler import RESTORED_BLOCKS, ScheduledTokens
from bigmodel.server.loading import load
from tests.examples import alike
from tests.server.tiny import Collector, ask, fresh_tokenizer, tiny_model, tiny_tokenizer

B = PROMPT_BLOCK
PROMPT = [7 * n % 250 for n in range(5 * B + 9)]
PLACES = {
    "host": {"cpu": "1GiB"},
    "resident": {0: "64MiB", "cpu": "1GiB"},
    "streamed": {0: "23.4MiB", "cpu": "1GiB"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model(layers=4).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@cache
def placed(checkpoint: Path, place: str = "host") -> Loaded:
    loaded = load(str(checkpoint), max_memory=PLACES[place], batch_size=1, context_length=6 * B)  # type: ignore[arg-type]
    plan = loaded.plan
    assert place == ("host" if plan.main_device == "cpu" else "streamed" if plan.streamed else "resident")
    return loaded


def started(loaded: Loaded, folder: Path | None, **options: Any) -> Engine:
    engine = build_engine(
        loaded.model,
        loaded.tokenizer,
        loaded.plan,
        EngineOptions(**{"max_sequences": 2, "prefix_folder": folder, **options}),
        checkpoint=loaded.checkpoint,
    )
    engine.start()
    return engine


def answer(engine: Engine, prompt: list[int] = PROMPT, **params: Any) -> tuple[Collector, int]:
    """The answer to a prompt, and how many of its tokens came from the cache."""
    collector = ask(engine, prompt, max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2, **params)
    done = collector.wait()
    assert isinstance(done, Done)
    return collector, done.cached_tokens


def said(collector: Collector) -> list[Any]:
    """Tokens with their log-probabilities, which show every bit of the logits."""
    return [logprob for event in collector.events for logprob in getattr(event, "logprobs", ())]


@pytest.mark.slow
@alike("place", [*PLACES], first=1)
def test_a_new_engine_continues_what_another_has_computed(
    checkpoint: Path, tmp_path: Path, place: str, accelerators: None
) -> None:
    loaded = placed(checkpoint, place)
    wanted, _ = answer(first := started(loaded, None))
    first.stop()
    for cached in (0, 5 * B):
        engine = started(loaded, tmp_path)
        collector, found = answer(engine)
        engine.stop()
        assert said(collector) == said(wanted)
        assert found == cached
    files = engine.core.scheduler.prefix.files
    assert files is not None
    assert (files.restored, files.written, files.refused) == (5 * B, 0, 0)


@pytest.mark.slow
@alike("place", [*PLACES], first=1)
def test_an_engine_that_has_computed_another_prompt_reads_files_too(
    checkpoint: Path, tmp_path: Path, place: str, accelerators: None
) -> None:
    loaded = placed(checkpoint, place)
    wanted, _ = answer(first := started(loaded, tmp_path))
    first.stop()
    engine = started(loaded, tmp_path)
    answer(engine, [3] * 9)
    collector, cached = answer(engine)
    engine.stop()
    assert said(collector) == said(wanted)
    assert cached == 5 * B


@pytest.mark.slow
def test_only_what_begins_alike_is_read(checkpoint: Path, tmp_path: Path) -> None:
    loaded = placed(checkpoint)
    answer(first := started(loaded, tmp_path))
    first.stop()
    changed = [*PROMPT[: 3 * B], 5, *PROMPT[3 * B + 1 :]]
    wanted, _ = answer(fresh := started(loaded, None), changed)
    fresh.stop()
    collector, cached = answer(engine := started(loaded, tmp_path), changed)
    engine.stop()
    assert said(collector) == said(wanted)
    assert cached == 3 * B


@pytest.mark.slow
def test_what_memory_has_let_go_of_is_read(checkpoint: Path, tmp_path: Path) -> None:
    loaded = placed(checkpoint)
    per_token = 4 * 2 * 2 * 16 * 4
    engine = started(loaded, tmp_path, kv_bytes=7 * B * per_token, max_sequences=1)
    wanted, _ = answer(engine)
    answer(engine, [3] * len(PROMPT))
    collector, cached = answer(engine)
    engine.stop()
    assert said(collector) == said(wanted)
    assert cached == 5 * B
    files = engine.core.scheduler.prefix.files
    assert files is not None
    assert files.restored > 0


@pytest.mark.slow
def test_a_torn_file_is_computed_again(checkpoint: Path, tmp_path: Path) -> None:
    loaded = placed(checkpoint)
    wanted, _ = answer(first := started(loaded, tmp_path))
    first.stop()
    by_age = sorted(tmp_path.rglob("*.safetensors"), key=lambda path: -path.stat().st_mtime_ns)
    assert len(by_age) == 5
    by_age[2].write_bytes(by_age[2].read_bytes()[:-1])
    collector, cached = answer(engine := started(loaded, tmp_path))
    engine.stop()
    assert said(collector) == said(wanted)
    assert cached == 2 * B
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5


@pytest.mark.slow
@alike("change", ["tokenizer", "weights", "placement"], first=1)
def test_blocks_of_another_model_tokenizer_or_place_are_not_used(
    checkpoint: Path, tmp_path: Path, change: str, accelerators: None
) -> None:
    answer(first := started(placed(checkpoint), tmp_path / "cache"))
    first.stop()
    loaded = placed(checkpoint)
    if change == "weights":
        folder = tmp_path / "other"
        tiny_model(1, layers=4).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        loaded = placed(folder)
    elif change == "tokenizer":
        tokenizer = fresh_tokenizer()
        tokenizer.add_tokens(["<other>"])
        loaded = replace(loaded, tokenizer=tokenizer)
    else:
        loaded = placed(checkpoint, "resident")
    _, cached = answer(engine := started(loaded, tmp_path / "cache"))
    engine.stop()
    assert cached == 0


@pytest.mark.slow
def test_texts_that_grow_do_not_wait_for_a_long_prompt_to_be_read(checkpoint: Path, tmp_path: Path) -> None:
    loaded = placed(checkpoint)
    answer(first := started(loaded, tmp_path))
    first.stop()
    engine = started(loaded, tmp_path)
    steps: list[tuple[list[tuple[int, int]], int]] = []
    schedule = engine.core.scheduler.schedule

    def watched() -> list[ScheduledTokens]:
        before = files.restored
        batch = schedule()
        steps.append(([(each.sequence.prompt_length, each.tokens) for each in batch], files.restored - before))
        return batch

    files = engine.core.scheduler.prefix.files
    assert files is not None
    engine.core.scheduler.schedule = watched  # type: ignore[method-assign]
    growing = ask(engine, [5, 6], max_tokens=40, ignore_eos=True)
    growing.next()
    _, cached = answer(engine)
    growing.wait()
    engine.stop()
    assert cached == 5 * B
    reading = [(batch, tokens) for batch, tokens in steps if tokens]
    assert [tokens for _, tokens in reading] == [RESTORED_BLOCKS * B, B]
    assert reading[0][0] == [(2, 1)]  # the other text grew, and nothing of the prompt was computed
    assert (len(PROMPT), 9) in reading[1][0]


@pytest.mark.slow
def test_requests_go_on_while_the_disk_is_full(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = placed(checkpoint)
    wanted, _ = answer(first := started(loaded, None))
    first.stop()
    engine = started(loaded, tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        found = [answer(engine), answer(engine), answer(engine, [3] * len(PROMPT))]
        engine.stop()
    assert [said(collector) for collector, _ in found[:2]] == [said(wanted)] * 2
    assert [cached for _, cached in found] == [0, 5 * B, 0]
    assert not list(tmp_path.rglob("*.*"))
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert os.strerror(errno.ENOSPC) in message


@pytest.mark.slow
def test_log_probabilities_of_a_prompt_are_computed(checkpoint: Path, tmp_path: Path) -> None:
    loaded = placed(checkpoint)
    answer(first := started(loaded, tmp_path))
    first.stop()
    collector, cached = answer(engine := started(loaded, tmp_path), prompt_logprobs=True)
    engine.stop()
    assert cached == 0
    found = [event.prompt_logprobs for event in collector.events if getattr(event, "prompt_logprobs", None)]
    assert [len(each or ()) for each in found] == [len(PROMPT)]


@pytest.mark.slow
def test_a_folder_without_use_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    loaded = placed(checkpoint)
    for wrong, message in (
        ({"prefix_cache": False}, "needs the prefix cache"),
        ({"prefix_folder_bytes": 1000}, "do not hold one block"),
    ):
        with pytest.raises(ServeError, match=message):
            started(loaded, tmp_path, **wrong)
    with pytest.raises(ServeError, match="from a checkpoint"):
        started(replace(loaded, checkpoint=None), tmp_path)
    assert not list(tmp_path.iterdir())
