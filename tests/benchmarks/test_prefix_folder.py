"""The first token after a prompt that is read from files, beside one that is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.benchmarks.harness import BenchmarkError, Samples
from bigmodel.benchmarks.llama_cpp import MISSING, LlamaServer
from bigmodel.benchmarks.prefix_folder import (
    COMPUTED,
    EVICTED,
    PEER_COMPUTED,
    PEER_RESTORED,
    READ,
    Slot,
    limits,
)

from .answering import answer, rows


@pytest.mark.slow
def test_reading_a_prompt_is_measured_beside_computing_it(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["prefix_folder", "--no-peers"], workdir, capsys)
    assert [row["prompt"] for row in rows(found)] == [COMPUTED, READ, EVICTED]
    assert all(row["first token"] > 0 for row in rows(found))
    assert MISSING in found["notes"]


@pytest.mark.slow
def test_saved_slots_of_llama_cpp_are_measured_in_the_same_rounds(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    found = answer(["prefix_folder"], workdir, capsys)
    assert [row["prompt"] for row in rows(found)] == [COMPUTED, READ, EVICTED, PEER_COMPUTED, PEER_RESTORED]
    seconds = {row["prompt"]: row["first token"] for row in rows(found)}
    for base, names in ((COMPUTED, (COMPUTED, READ, EVICTED)), (PEER_COMPUTED, (PEER_COMPUTED, PEER_RESTORED))):
        sooner = [row["sooner"] for row in rows(found) if row["prompt"] in names]
        assert sooner == pytest.approx([seconds[base] / seconds[name] for name in names])
    assert found["settings"]["bytes of llama.cpp"] > 0
    assert not list(workdir.glob("bigmodel-slots-*"))


class FakeServer(LlamaServer):
    """Answers with given counts.

    Args:
        saved: tokens of the file that is written.
        restored: tokens of the file that is read.
        reused: tokens that the slot had of a prompt.
        computed: tokens that were computed of it.
    """

    def __init__(self, saved: int = 48, restored: int = 48, reused: int = 48, computed: int = 16) -> None:
        self.saved, self.restored, self.reused, self.computed = saved, restored, reused, computed

    def complete(self, prompt: list[int], tokens: int, *, reuse: bool = False) -> dict[str, float]:
        return {"cache_n": self.reused, "prompt_n": self.computed}

    def save(self, name: str) -> int:
        return self.saved

    def restore(self, name: str) -> int:
        return self.restored

    def erase(self) -> int:
        return 0


PROMPT = [*range(64)]


def test_tokens_of_a_slot_that_did_not_come_from_its_file_are_not_timed() -> None:
    assert Slot(FakeServer(), PROMPT, 48).run() > 0
    assert Slot(FakeServer(reused=0, computed=64), PROMPT, 0).run() > 0
    for wrong in ({"restored": 0}, {"restored": 32, "reused": 32, "computed": 32}, {"reused": 0}, {"computed": 15}):
        with pytest.raises(BenchmarkError, match="48 should have come from the file"):
            Slot(FakeServer(**wrong), PROMPT, 48).run()
    with pytest.raises(BenchmarkError, match="used 48 of the slot, and computed 16; 0 should have"):
        Slot(FakeServer(), PROMPT, 0).run()


def test_a_slot_is_saved_with_the_tokens_that_are_read() -> None:
    Slot(FakeServer(), PROMPT, 48).save()
    with pytest.raises(BenchmarkError, match="saved 47 tokens, not 48"):
        Slot(FakeServer(saved=47), PROMPT, 48).save()


def limits_of(seconds: dict[str, float]) -> list[bool]:
    return [limit.kept for limit in limits(Samples({name: {"seconds": [value]} for name, value in seconds.items()}))]


def test_reading_is_held_to_a_tenth_of_computing() -> None:
    assert limits_of({COMPUTED: 2.0, READ: 0.19, EVICTED: 0.21}) == [True, False]


def test_reading_is_held_to_the_time_of_a_restored_slot() -> None:
    seconds = {COMPUTED: 2.0, READ: 0.15, EVICTED: 0.18, PEER_COMPUTED: 9.0}
    assert limits_of({**seconds, PEER_RESTORED: 0.16}) == [True, True, True]
    assert limits_of({**seconds, PEER_RESTORED: 0.14}) == [True, True, False]
