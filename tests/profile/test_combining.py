from __future__ import annotations

import torch

from bigmodel.profile.combining import combining_module
from bigmodel.profile.profiling import profile_model
from bigmodel.profile.trace import Leave

from .models import Stack, on_meta, tiny_llama


def test_a_model_that_does_not_say_what_must_stay_whole_computes_with_all_its_parts_return() -> None:
    modules = dict(on_meta(Stack).named_modules())
    assert combining_module(modules, "blocks.0", {"Block"}) == ""
    assert combining_module(modules, "blocks.0.up", {"Block"}) == "blocks.0"
    assert combining_module(modules, "", {"Block"}) is None


def test_one_that_says_so_passes_on_what_its_blocks_return() -> None:
    modules, whole = dict(tiny_llama().named_modules()), {"LlamaDecoderLayer"}
    assert combining_module(modules, "model.layers.0", whole) is None
    assert combining_module(modules, "lm_head", whole) is None


def test_but_not_past_a_module_that_holds_tensors_or_must_stay_whole() -> None:
    model = tiny_llama()
    modules, whole = dict(model.named_modules()), {"LlamaDecoderLayer"}
    assert combining_module(modules, "model.layers.0.mlp", whole) == "model.layers.0"
    model.get_submodule("model").register_buffer("scale", torch.ones(1))
    assert combining_module(modules, "model.layers.0", whole) == "model"


def test_a_profile_tells_what_is_given_back_rows_of_tables_and_the_models_own_output() -> None:
    profile = profile_model(tiny_llama(), context_length=16, new_tokens=2)
    given_back = {e.unit for e in profile.phases[0].trace.events if isinstance(e, Leave) and e.outputs}
    assert {profile.units[index].name for index in given_back} == {"model.embed_tokens", "lm_head"}
