"""The measured stand-in for the bookkeeping of cached experts is held against what `dispatch` does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from bigmodel.dispatch import from_pretrained
from bigmodel.profile.machine.probe_experts import MiniatureExperts, expert_overhead, miniature_call
from bigmodel.profile.machine.timing import QUICK

from ...examples import alike


def calls_in(work: Callable[[], object]) -> int:
    """Return how many function calls, in Python and C, `work` makes in this thread."""
    count = [0]

    def watch(_frame: object, event: str, _argument: object) -> None:
        count[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count[0]


def test_the_overhead_grows_with_the_number_of_experts() -> None:
    found = expert_overhead(QUICK)
    assert 0 < found.module + 2 * found.chosen < 1
    assert 0 < found.ahead < 1


def test_the_miniature_returns_the_slots_of_the_chosen_experts() -> None:
    experts, numbers = MiniatureExperts(8), torch.tensor([[5, 2], [2, 7]])
    experts.fetch_ahead([])
    assert experts(torch.zeros(2, 1), numbers, torch.zeros(2, 2)).tolist() == numbers.tolist()


def test_prefetching_has_an_overhead_per_expert() -> None:
    few, many = (calls_in(partial(MiniatureExperts(count).fetch_ahead, range(count))) for count in (4, 8))
    assert (many - few) / 4 > 10


@pytest.mark.slow
@alike("chosen", [2, 8], first=1)
def test_the_miniature_makes_as_many_calls_as_a_layer_of_a_dispatched_mixture(chosen: int, tmp_path: Path) -> None:
    two, four = (calls_of_dispatching(layers, chosen, tmp_path / str(layers)) for layers in (2, 4))
    assert (four - two) / 2 == pytest.approx(calls_in(miniature_call(chosen)), rel=0.3)


def calls_of_dispatching(layers: int, chosen: int, folder: Path) -> int:
    """Return how many more calls a forward of a mixture makes whose experts are fetched one by one."""
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=32, num_experts_per_tok=chosen,
    )  # fmt: skip
    plain = MixtralForCausalLM(config).eval()
    plain.save_pretrained(folder)
    ids = torch.ones(1, 1, dtype=torch.long)
    counts = []
    for model in (from_pretrained(folder, {"": "disk"}), plain):
        model.set_experts_implementation("grouped_mm")
        with torch.inference_mode():
            model(ids)  # the experts are there afterwards
            counts.append(calls_in(lambda model=model: model(ids)))
    dispatched, alone = counts
    return dispatched - alone
