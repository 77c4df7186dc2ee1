from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM, T5Config, T5ForConditionalGeneration

from bigmodel.errors import PlanError
from bigmodel.profile import find_no_split_classes, find_units, named_tensors, profile_units
from bigmodel.profile.model.units import combining_module, growing_layers, layer_indices, methods_of, split_units
from bigmodel.profile.profile import profile_model
from bigmodel.profile.trace.events import Leave

from ..models import Block, Flat, Stack, on_meta, tiny_llama


def names(model: nn.Module, classes: list[str] | None = None) -> list[str]:
    return [unit.name for unit in find_units(model, classes)]


def test_transformers_models_declare_classes_that_are_not_split() -> None:
    assert find_no_split_classes(tiny_llama()) == {"LlamaDecoderLayer"}


def test_repeated_composite_modules_are_blocks() -> None:
    assert find_no_split_classes(Stack()) == {"Block"}
    assert find_no_split_classes(nn.Sequential(Block(4), Block(4))) == {"Block"}


def test_repeated_leaves_are_not_blocks() -> None:
    assert find_no_split_classes(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == frozenset()


def test_a_lone_block_in_a_module_list_is_one() -> None:
    assert find_no_split_classes(Stack(depth=1)) == {"Block"}


def test_experts_inside_a_block_do_not_split_it() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(2, 2)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(4))

    assert find_no_split_classes(nn.ModuleList(Layer() for _ in range(2))) == {"Layer"}


def test_split_blocks_are_their_leaf_modules_but_for_what_writes_to_a_cache() -> None:
    found = [unit.name for unit in split_units(tiny_llama())]
    layer = [name for name in found if name.startswith("model.layers.1.")]
    assert layer == [
        f"model.layers.1.{part}"
        for part in (
            "self_attn",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "mlp.act_fn",
            "input_layernorm",
            "post_attention_layernorm",
        )
    ]


def test_a_module_that_holds_tensors_beside_its_children_is_not_split() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(4, 2, 2))
            self.act = nn.SiLU()

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Experts(), nn.Linear(2, 2)))
    assert [unit.name for unit in split_units(model)] == ["0", "1.0", "1.1"]


def test_split_blocks_hold_each_weight_once() -> None:
    for model in (Stack(), tiny_llama(), nn.TransformerEncoderLayer(8, 2)):
        held = [spec.name for unit in profile_units(model, units=split_units(model)) for spec in unit.tensors]
        assert sorted(held) == sorted(name for name, *_ in named_tensors(model))


def test_modules_that_use_their_childrens_weights_are_not_split() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2), nn.Linear(8, 8))
    assert [unit.name for unit in split_units(model)] == ["0", "1"]


def test_splitting_blocks_leaves_no_classes_whole() -> None:
    with pytest.raises(PlanError, match="split_blocks"):
        profile_model(tiny_llama(), split_blocks=True, no_split_module_classes=["LlamaDecoderLayer"])


def test_units_are_blocks_and_their_siblings() -> None:
    assert names(Stack(depth=2)) == ["embed", "blocks.0", "blocks.1", "norm", "head"]


def test_tensors_that_a_split_module_holds_itself_are_units() -> None:
    units = {unit.name: unit for unit in find_units(Stack(depth=2, direct=True))}
    assert units["scale"].class_name == "Parameter"
    assert units["offset"].class_name == "Buffer"
    assert units["scale"].is_tensor
    assert not units["blocks.0"].is_tensor


def test_composite_modules_beside_blocks_stay_whole() -> None:
    class WithEmbeddings(Stack):
        def __init__(self) -> None:
            super().__init__(depth=2)
            self.embed = nn.ModuleDict({"word": nn.Embedding(4, 4)})
            self.pooler = Block(4)

    assert names(WithEmbeddings()) == ["embed.word", "blocks.0", "blocks.1", "norm", "head", "pooler"]


def test_named_classes_replace_the_search_and_an_empty_list_splits_to_leaves() -> None:
    model = Stack(depth=1)
    assert names(model, []) == ["embed", "blocks.0.up", "blocks.0.down", "norm", "head"]
    assert names(model, ["Linear"]) == ["embed", "blocks.0.up", "blocks.0.down", "norm", "head"]
    assert names(nn.Sequential(Flat(), Flat()), ["Flat"]) == ["0", "1"]


def test_a_model_that_is_one_leaf_is_one_unit() -> None:
    assert names(nn.Linear(2, 2)) == [""]


def test_plain_embeddings_are_lookups() -> None:
    lookups = {unit.name for unit in find_units(Stack()) if unit.is_lookup}
    assert lookups == {"embed"}
    assert not find_units(nn.Embedding(2, 2, max_norm=1.0))[0].is_lookup


def test_units_cover_every_tensor_once() -> None:
    for model in (Stack(direct=True), Flat(), on_meta(Stack, tied=True), tiny_llama()):
        owners = names(model)
        for name, *_ in named_tensors(model):
            holding = [owner for owner in owners if name == owner or name.startswith(f"{owner}.")]
            assert len(holding) == 1, name


def test_a_model_without_declared_classes_combines_the_outputs_of_all_parts() -> None:
    modules = dict(on_meta(Stack).named_modules())
    assert combining_module(modules, "blocks.0", {"Block"}) == ""
    assert combining_module(modules, "blocks.0.up", {"Block"}) == "blocks.0"
    assert combining_module(modules, "", {"Block"}) is None


def test_a_model_with_declared_classes_passes_on_the_outputs_of_its_blocks() -> None:
    modules, whole = dict(tiny_llama().named_modules()), {"LlamaDecoderLayer"}
    assert combining_module(modules, "model.layers.0", whole) is None
    assert combining_module(modules, "lm_head", whole) is None


def test_a_module_with_tensors_or_of_a_declared_class_combines_outputs() -> None:
    model = tiny_llama()
    modules, whole = dict(model.named_modules()), {"LlamaDecoderLayer"}
    assert combining_module(modules, "model.layers.0.mlp", whole) == "model.layers.0"
    model.get_submodule("model").register_buffer("scale", torch.ones(1))
    assert combining_module(modules, "model.layers.0", whole) == "model"


def test_an_output_goes_through_sequentials_to_the_module_that_computes_with_it() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
            self.other = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.other[0](x)

    modules = dict(nn.Sequential(Branches(), nn.Linear(2, 2)).named_modules())
    assert combining_module(modules, "0.one.1.0", ()) == "0"
    assert combining_module(modules, "0.other.0", ()) == "0"
    assert combining_module(modules, "0.one.0", ()) is None  # goes to the next child
    assert combining_module(modules, "0", ()) is combining_module(modules, "1", ()) is None


def test_only_transformers_models_declare_that_other_modules_may_be_split() -> None:
    class Declaring(Stack):
        _no_split_modules = ("Block",)

    modules = dict(on_meta(Declaring).named_modules())
    assert combining_module(modules, "blocks.0", {"Block"}) == ""


@pytest.mark.slow
def test_outputs_of_embeddings_are_recorded_as_moved() -> None:
    profile = profile_model(tiny_llama(), context_length=16, new_tokens=2)
    moved = {e.unit for e in profile.phases[0].trace.events if isinstance(e, Leave) and e.outputs}
    assert {profile.units[index].name for index in moved} == {"model.embed_tokens"}


def test_bytes_of_units_add_up_to_the_model() -> None:
    units = {unit.name: unit for unit in profile_units(Flat())}
    assert units["batchnorm"].weights == 32
    assert units["batchnorm"].buffers == 40
    assert sum(unit.nbytes for unit in units.values()) == 236


def test_a_unit_counts_tied_tensors_once() -> None:
    block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    block[1].weight = block[0].weight
    (unit,) = profile_units(nn.ModuleList([block]), no_split_module_classes=["Sequential"])
    assert unit.weights == 64
    assert len(unit.tensors) == 2


def test_slot_bytes_align_every_tensor_and_include_buffers_on_request() -> None:
    unit = {unit.name: unit for unit in profile_units(Flat())}["batchnorm"]
    assert unit.slot_bytes() == 2 * 512
    assert unit.slot_bytes(with_buffers=True) == 5 * 512


def test_dtype_applies_to_the_units() -> None:
    narrow, wide = profile_units(Stack(), "float16"), profile_units(Stack())
    assert [2 * unit.nbytes for unit in narrow] == [unit.nbytes for unit in wide]


class Coder(nn.Module):
    """Has methods of every kind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def set_scale(self, scale: float) -> None:
        self.scale = scale

    def pieces(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x

    def extra_repr(self) -> str:
        return ""

    def requires_grad_(self, requires_grad: bool = True) -> Coder:
        return super().requires_grad_(requires_grad)  # type: ignore[return-value]


def test_public_methods_with_arguments_that_the_class_introduces_are_found() -> None:
    assert list(methods_of(Coder())) == ["encode"]


def test_methods_that_a_class_of_a_library_only_declares_are_found() -> None:
    class Declared(nn.Module):
        __module__ = "library"

        @abstractmethod
        def encode(self, x: torch.Tensor) -> torch.Tensor: ...

        def prepare(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Codec(Declared):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def prepare(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    assert list(methods_of(Codec())) == ["encode"]


def test_a_method_of_the_instance_is_left_alone() -> None:
    coder = Coder()
    coder.__dict__["encode"] = coder.forward
    assert list(methods_of(coder)) == []


def test_containers_of_pytorch_have_none() -> None:
    assert list(methods_of(nn.ModuleList())) == list(methods_of(nn.ModuleDict())) == []


NAMES = ["model.embed_tokens", "model.layers.0", "model.layers.3", "lm_head"]


def test_the_layers_of_a_cache_are_found_in_the_module() -> None:
    model: Any = tiny_llama()
    assert layer_indices(model.model.layers[2]) == {2}
    assert layer_indices(model.lm_head) == set()


def test_layers_of_full_attention_grow() -> None:
    assert growing_layers(tiny_llama(), NAMES) == {"model.layers.0", "model.layers.3"}


def test_layers_with_a_window_do_not() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = MistralConfig(**sizes, vocab_size=96, sliding_window=8)
    assert not growing_layers(on_meta(MistralForCausalLM, config), NAMES)


def test_nor_those_of_models_with_an_encoder_and_of_other_modules() -> None:
    config = T5Config(d_model=32, d_ff=32, num_layers=2, num_heads=2, vocab_size=96)
    assert not growing_layers(on_meta(T5ForConditionalGeneration, config), ["decoder.block.0"])
    assert not growing_layers(nn.Linear(2, 2), [""])
