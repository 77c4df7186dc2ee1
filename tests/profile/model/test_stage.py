from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from bigmodel.errors import PlanError
from bigmodel.profile import profile_model
from bigmodel.profile.model.stage import PassedHead, PassedLayer, cut_stage, layers_of, stage_alone, units_of_whole

from ...examples import alike


def llama(**config: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": 4, **config})).eval()


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_stages_that_hand_on_hidden_states_have_the_bits_of_the_whole(tied: bool) -> None:
    whole = llama(tie_word_embeddings=tied)
    stages = [cut_stage(llama(tie_word_embeddings=tied), *cut) for cut in ((0, 1), (1, 3), (3, 4))]
    caches: list[object] = [None] * 3
    cache, handed, found = None, [torch.empty(0)], []

    def take(_: torch.Tensor) -> torch.Tensor:
        return handed[0]

    def give(hidden: torch.Tensor) -> torch.Tensor:
        handed[0] = hidden
        return hidden

    for stage, (before, behind) in zip(stages, ((None, 1), (0, 3), (2, None))):
        layers: Any = layers_of(stage)
        if before is not None:
            layers[before].exchange = take
        if behind is not None:
            layers[behind].exchange = give
    for ids in (torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6]]), torch.tensor([[7]])):
        expected = whole(ids, past_key_values=cache, use_cache=True)
        cache = expected.past_key_values
        for at, stage in enumerate(stages):
            output = stage(ids, past_key_values=caches[at], use_cache=True)
            caches[at] = output.past_key_values
        found.append(torch.equal(output.logits, expected.logits))
    assert found == [True] * 3


def test_a_stage_has_the_weights_of_its_layers_alone() -> None:
    first, last = cut_stage(llama(), 0, 2), cut_stage(llama(), 2, 4)
    names = [{name for name, _ in stage.named_parameters()} for stage in (first, last)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {name for name, _ in llama().named_parameters()}
    assert isinstance(layers_of(first)[3], PassedLayer)
    assert isinstance(first.lm_head, PassedHead)


@torch.no_grad()
def test_passed_layers_count_tokens_without_taking_memory() -> None:
    stage = cut_stage(llama(), 2, 4)
    cache = stage(torch.tensor([[1, 2, 3, 4, 5]]), use_cache=True).past_key_values
    cache = stage(torch.tensor([[6]]), past_key_values=cache, use_cache=True).past_key_values
    assert cache.get_seq_length() == 6
    assert cache.layers[0].keys.untyped_storage().nbytes() == 1
    assert not cache.layers[1].is_initialized
    assert cache.layers[2].keys.shape[2] == 6
    for counting in (cache.layers[0], *cache.layers[2:]):  # transformers 5.17 crops no layer that is not initialised
        counting.crop(-2)
    assert cache.get_seq_length() == 4


@pytest.mark.slow
@alike("cut", [(0, 2), (1, 3), (2, 4)], first=1)
def test_a_stage_alone_is_profiled_as_the_stage_within_its_model(cut: tuple[int, int]) -> None:
    model, shape = llama(), {"context_length": 16, "new_tokens": 4}
    before = {name: (tensor.device, tensor.shape) for name, tensor in model.state_dict().items()}
    alone = profile_model(stage_alone(model, *cut), **shape)
    assert {name: (tensor.device, tensor.shape) for name, tensor in model.state_dict().items()} == before
    within = profile_model(cut_stage(llama(), *cut), **shape)
    taking = [(unit, kv) for unit, kv in zip(within.units, within.kv_cache) if unit.tensors]
    found = units_of_whole(alone.units, cut[0])
    assert [unit.name for unit in found if unit.tensors] == [unit.name for unit, _ in taking]
    assert [unit.nbytes for unit in found if unit.tensors] == [unit.nbytes for unit, _ in taking]
    assert [kv for unit, kv in zip(found, alone.kv_cache) if unit.tensors] == [kv for _, kv in taking]
    names = {name for name, _ in cut_stage(llama(), *cut).named_parameters()}
    assert {spec.name for unit in found for spec in unit.tensors if not spec.is_buffer} == names


def test_kinds_of_a_stage_alone_are_those_of_its_layers() -> None:
    model = llama()
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention", "chunked_attention"]
    alone = stage_alone(model, 1, 3)
    assert alone.config.layer_types == ["sliding_attention", "full_attention"]
    assert [layer.self_attn.layer_idx for layer in layers_of(alone)] == [0, 1]
    assert len(model.config.layer_types) == 4
    assert [layer.self_attn.layer_idx for layer in layers_of(model)] == [0, 1, 2, 3]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PlanError, match="Linear cannot be cut into stages"):
        cut_stage(nn.Linear(2, 2), 0, 1)
    with pytest.raises(PlanError, match="layers 2 to 2 of 4"):
        cut_stage(llama(), 2, 2)
    model = llama()
    model.config.layer_types = ["linear_attention"] * 4
    with pytest.raises(PlanError, match="linear_attention"):
        layers_of(model)
    model = llama(num_kv_shared_layers=2)
    with pytest.raises(PlanError, match="num_kv_shared_layers of its config"):
        layers_of(model)
