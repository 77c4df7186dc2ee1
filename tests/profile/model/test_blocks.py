"""Which classes of modules are a model's blocks, which are never split."""

from __future__ import annotations

from torch import nn

from bigmodel.profile import find_no_split_classes

from ..models import Block, Stack, tiny_llama


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
