from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bigmodel.errors import ServeError
from bigmodel.nodes.stages import RunningStage
from bigmodel.profile.model.stage import cut_stage


class Answering:
    """Stands for the last stage: answers each message with logits."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []

    def send(self, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.sent.append((values, tensors))

    def receive(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        rows = self.sent[-1][1]["hidden"].shape[0]
        return {}, {"logits": torch.arange(64.0).repeat(rows, 1, 1)}


def first_stage() -> tuple[Any, Answering]:
    """Return the first of two stages, and what stands for the other."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=2, eos_token_id=None)
    model, peer = cut_stage(LlamaForCausalLM(config), 0, 1), Answering()
    other: Any = peer
    RunningStage(model, 0, 1, None, other, other)
    return model, peer


def test_a_step_sends_its_token_alone_and_says_what_the_cache_holds() -> None:
    model, peer = first_stage()
    found = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False)
    assert found.tolist() == [[1, 2, 3, 63, 63, 63]]
    assert [values["past"] for values, _ in peer.sent] == [0, 3, 4]
    assert [tuple(tensors["hidden"].shape) for _, tensors in peer.sent] == [(1, 3, 32), (1, 1, 32), (1, 1, 32)]


def test_each_text_has_a_cache_of_its_own_and_those_of_ended_ones_are_dropped() -> None:
    model, peer = first_stage()
    for _ in range(2):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=1, do_sample=False)
    assert [(values["cache"], values["dropped"]) for values, _ in peer.sent] == [(1, []), (2, [1])]


def test_what_other_stages_do_not_follow_is_refused() -> None:
    model, _ = first_stage()
    with pytest.raises(ServeError, match="without beams"):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, num_beams=2, do_sample=False)
    with pytest.raises(ServeError, match="called with labels"):
        model(input_ids=torch.tensor([[1]]), labels=torch.tensor([[1]]))
