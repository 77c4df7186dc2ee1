"""What is counted is held against what `dispatch` does: the calls beyond those of the same model in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from bigmodel.dispatch import from_pretrained
from bigmodel.plan.asking import calls_of_asking
from bigmodel.profile.experts import Choice
from bigmodel.profile.probe_asking import calls_in

LAYERS = 2


@pytest.mark.parametrize("chosen", [2, 8])
def test_calls_are_as_many_as_a_dispatched_mixture_makes(chosen: int, tmp_path: Path) -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=32, num_experts_per_tok=chosen,
    )  # fmt: skip
    plain = MixtralForCausalLM(config).eval()
    plain.save_pretrained(tmp_path)
    ids = torch.ones(1, 1, dtype=torch.long)
    counts = []
    for model in (from_pretrained(tmp_path, {"": "disk"}), plain):
        model.set_experts_implementation("grouped_mm")
        with torch.inference_mode():
            model(ids)  # the experts are there afterwards
            counts.append(calls_in(lambda model=model: model(ids)))
    dispatched, alone = counts
    assert (dispatched - alone) / LAYERS == pytest.approx(calls_of_asking(Choice(1, chosen, 32)), rel=0.3)


def test_where_nearly_all_are_wanted_the_next_modules_are_seen_to() -> None:
    few, nearly_all = Choice(1, 2, 8), Choice(64, 2, 8)
    assert nearly_all.wanted > 7
    assert calls_of_asking(nearly_all) - calls_of_asking(few) > 8 * 28
