"""Calls that repeat an earlier one are replayed: what is recorded is what running all of them records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, GptOssConfig, GptOssForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from bigmodel.profile import Workload, profile_units
from bigmodel.profile.trace.dry_run import Phase, dry_run
from bigmodel.profile.trace.generation import keeps_mask
from bigmodel.profile.trace.replaying import CachedLayer, is_cache

from ...examples import alike
from ..models import tiny_llama

CPU = torch.device("cpu")
WIDTH = 8


class Part(nn.Module):
    """A module of a block, which counts how often it runs."""

    ran: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        self.ran[type(self).__name__] += 1
        return self.compute(x)

    def compute(self, x: Any) -> Any:
        return torch.relu(self.project(x)) * 2


class Block(nn.Module):
    def __init__(self, part: type[Part], **settings: Any) -> None:
        super().__init__()
        self.part = part(**settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.give(x) + x

    def give(self, x: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.part(x)
        return given


class Blocks(nn.Module):
    """Three blocks, each with one part: too few for a sample of them. Inputs of the first were made by no block."""

    _no_split_modules = ("Block",)

    def __init__(self, block: type[Block] = Block, part: type[Part] = Part, *settings: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(part, **each) for each in settings or ({}, {}, {}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def recorded(model: nn.Module, *args: torch.Tensor) -> tuple[int, list[Phase], list[Phase]]:
    """Return how often the parts ran with replays, and what is recorded with and without."""
    units, given = profile_units(model), args or (torch.zeros(3, WIDTH),)
    Part.ran.clear()
    found = dry_run(model, units, Workload(), CPU, example=(given, {}))
    ran = Part.ran.total()
    assert found, "nothing was recorded"
    return ran, found, dry_run(model, units, Workload(), CPU, example=(given, {}), every_layer=True)


def test_a_part_that_repeats_another_is_replayed() -> None:
    ran, replayed, every = recorded(Blocks())
    assert (ran, replayed) == (2, every)


def test_other_shapes_run() -> None:
    class Narrowing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.give(x)[1:]

    ran, replayed, every = recorded(Blocks(Narrowing), torch.zeros(5, WIDTH))
    assert (ran, replayed) == (3, every)


class Scaled(Part):
    def __init__(self, power: int = 1) -> None:
        super().__init__()
        self.power = power

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.power):
            x = self.project(x)
        return x


def test_a_part_of_another_setting_runs() -> None:
    ran, replayed, every = recorded(Blocks(Block, Scaled, {"power": 1}, {"power": 2}, {"power": 1}))
    assert (ran, replayed) == (3, every)


class Frozen(Part):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.requires_grad_(not frozen)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        # PyTorch folds the batch of a strided tensor into one product where the weight requires gradients.
        return self.project(x.view(1, 4, WIDTH).transpose(0, 1)).view(4, WIDTH)


def test_a_part_with_a_frozen_weight_runs() -> None:
    settings = ({"frozen": False}, {"frozen": True}, {"frozen": False})
    ran, replayed, every = recorded(Blocks(Block, Frozen, *settings), torch.zeros(4, WIDTH))
    assert (ran, replayed) == (3, every)


def test_a_part_whose_setting_its_block_changes_runs() -> None:
    class Changing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.part.power = 3
            return self.give(self.give(x))

    _, replayed, every = recorded(Blocks(Changing, Scaled))
    assert replayed == every

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.give(x)
            self.part.power += 1
            return self.give(x)

    ran, replayed, every = recorded(Blocks(Counting, Scaled))
    assert (ran, replayed) == (5, every)  # the third block begins as the second did


class Remembering(Part):
    """Keeps its result, which is not freed."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.project(x)
        return self.kept * 2


class Noting(Part):
    """Counts its calls in a list, and takes more in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = [0]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.notes[0] += 1
        return self.project(torch.cat([x] * self.notes[0]))[: len(x)]


class Twice(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.give(self.give(x))


@pytest.mark.parametrize(("part", "forwards"), [(Remembering, 2), (Noting, 1)])
def test_a_part_that_keeps_something_runs(part: type[Part], forwards: int) -> None:
    ran, replayed, every = recorded(Blocks(Twice, part))
    assert (ran, replayed) == (6 * forwards, every)  # what modules keep shows in a second forward


def test_a_part_that_asks_for_an_unknown_value_runs() -> None:
    class Asking(Part):
        def compute(self, x: torch.Tensor) -> torch.Tensor:
            return self.project(x) if x.sum() > 0 else torch.cat([x, x])[: len(x)]

    _, replayed, every = recorded(Blocks(Twice, Asking))
    assert replayed == every


@pytest.mark.slow
def test_a_config_that_is_changed_between_calls_of_the_model_is_read_again() -> None:
    model = tiny_llama(num_hidden_layers=2, hidden_size=WIDTH)

    class Configured(Part):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(wide=False)

        def compute(self, x: torch.Tensor) -> torch.Tensor:
            return self.project(torch.cat([x, x]))[: len(x)] if self.config.wide else self.project(x)

    for layer in model.model.layers:
        layer.mlp = Configured()

    def change(called: nn.Module, _: Any) -> None:
        for layer in called.model.layers:
            layer.mlp.config.wide = not layer.mlp.config.wide

    model.register_forward_pre_hook(change)
    units = profile_units(model)
    replayed, every = (
        dry_run(model, units, Workload(1, 9, None), CPU, every_layer=every_layer) for every_layer in (False, True)
    )
    assert len(every) == 2
    assert replayed == every


class Returning(Part):
    """Returns its argument, two views of one new tensor, and a third tensor."""

    def compute(self, x: torch.Tensor) -> Any:
        left, right = self.project(x).chunk(2, -1)
        return x, left, right, left + 1


class Adding(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same, left, right, more = self.part(x)
        return torch.cat([left, right + more], -1) + same


def test_arguments_and_views_are_returned_as_such() -> None:
    ran, replayed, every = recorded(Blocks(Adding, Returning))
    assert (ran, replayed) == (2, every)


class Taking(Part):
    """Takes a tensor from the list that it is given, so that this is freed."""

    def compute(self, x: Any) -> Any:
        taken = self.project(x.pop())
        return torch.relu(taken)


class Listing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.part([x + 1])
        return given


def test_a_tensor_that_is_taken_from_a_list_is_freed_where_it_was() -> None:
    _, replayed, every = recorded(Blocks(Listing, Taking))
    assert replayed == every


def test_a_module_that_is_not_replayed_holds_no_argument() -> None:
    class Hooked(Listing):
        """Is no block: it is called by one, with a list."""

        def forward(self, x: Any) -> torch.Tensor:
            given: torch.Tensor = self.part(x)
            return given

    class Outer(Block):
        def __init__(self, part: type[Part]) -> None:
            super().__init__(part)
            self.inner = Hooked(part)
            self.inner.register_forward_hook(lambda *_: None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given: torch.Tensor = self.inner([x + 1])
            return given

    _, replayed, every = recorded(Blocks(Outer, Taking))
    assert replayed == every


def test_results_between_units_have_their_makers() -> None:
    class Gathering(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            results = []
            for block in self.blocks:
                x = block(x)
                results.append(x)
            return torch.stack(results).sum(0)

    ran, replayed, every = recorded(Gathering())
    assert (ran, replayed) == (2, every)
    assert replayed[0].combined == every[0].combined != frozenset()


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MIXTURE = {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}


def deepseek() -> nn.Module:
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    depth = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **MIXTURE, **latent, **depth))


def gpt_oss() -> nn.Module:
    depth = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **depth, num_experts_per_tok=2, sliding_window=8))


@pytest.mark.slow
@alike(
    ("make", "device"),
    [(deepseek, "virtual"), (gpt_oss, "cpu"), (gpt_oss, "virtual")],
    first=1,
    ids=["deepseek-virtual", "gpt-oss-cpu", "gpt-oss-virtual"],
)
def test_models_that_generate_have_the_same_traces(make: Any, device: str) -> None:
    model = make()
    units = profile_units(model)
    work = Workload(2, 33, None)
    replayed, every = (
        dry_run(model, units, work, torch.device(device), every_layer=every_layer) for every_layer in (False, True)
    )
    assert [phase.name for phase in every] == ["prefill", "decode"]
    assert replayed == every


LAYERS = 3

Forward = Callable[..., Any]


def recorded_with_cache(
    monkeypatch: pytest.MonkeyPatch, first: Forward | None = None, **work: Any
) -> tuple[int, list[Phase]]:
    """Return how often attention ran, and what is recorded, after comparing that with what running all calls records.

    Args:
        monkeypatch: replaces the forward of attention.
        first: called with its arguments before it.
        work: the workload.
    """
    keeps_mask()  # runs a model of its own, once in a process
    plain, calls = LlamaAttention.forward, []

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        if first is not None:
            first(module, kwargs["past_key_values"])
        return plain(module, *args, **kwargs)

    model = tiny_llama(num_hidden_layers=LAYERS)
    units, workload = profile_units(model), Workload(2, 9, None, **work)
    with monkeypatch.context() as patched:
        patched.setattr(LlamaAttention, "forward", counted)
        replayed = dry_run(model, units, workload, torch.device("cpu"))
        ran = len(calls)
        calls.clear()
        every = dry_run(model, units, workload, torch.device("cpu"), every_layer=True)
    assert [phase.name for phase in every] == ["prefill", "decode"]
    assert replayed == every
    return len(calls) - ran, replayed


@pytest.mark.slow
def test_attention_runs_once_in_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    spared, phases = recorded_with_cache(monkeypatch)
    forwards = sum(1 + len(phase.also) for phase in phases)
    assert spared >= forwards * (LAYERS - 1)


@pytest.mark.slow
def test_old_keys_are_freed_where_the_call_freed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (_, step) = recorded_with_cache(monkeypatch)
    assert len(step.trace.initial) >= 2 * LAYERS
    freed = {event.storage for event in step.trace.events if type(event).__name__ == "Free"}
    kept = [held for held in step.trace.initial if held.storage not in freed and held.unit >= 0]
    assert not kept  # keys and values of the text so far


@pytest.mark.long
@pytest.mark.slow
def test_attention_that_reads_another_layer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_first(_module: nn.Module, cache: Any) -> None:
        cache.layers[0].get_seq_length()

    spared, _ = recorded_with_cache(monkeypatch, read_first)
    alone, _ = recorded_with_cache(monkeypatch)
    assert spared < alone


@pytest.mark.slow
def test_attention_that_changes_the_cache_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(_module: nn.Module, cache: Any) -> None:
        cache.calls = getattr(cache, "calls", 0) + 1

    spared, _ = recorded_with_cache(monkeypatch, count)
    assert not spared


@pytest.mark.slow
def test_a_static_cache_is_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_with_cache(monkeypatch, cache="static")


def watched(act: Callable[[Any], object]) -> set[int]:
    """Return the positions of other layers than number 1 that a function accesses in a cache of three."""
    cache = SimpleNamespace(layers=["a", "b", "c"])
    layer = CachedLayer.of(cache, 1)
    assert layer is not None
    plain = cache.layers
    module = nn.Module()
    module.layer_idx = 1
    with layer.watched(module) as others:
        cache.own = module.layer_idx
        act(cache)
    assert type(module.layer_idx) is int
    assert cache.layers is plain
    return others


def test_accesses_of_other_layers_are_noted() -> None:
    assert watched(lambda cache: (cache.layers[cache.own], len(cache.layers))) == set()
    assert watched(lambda cache: cache.layers[1]) == {1}
    assert watched(lambda cache: cache.layers[0]) == {0}
    assert watched(lambda cache: [*cache.layers])
    assert watched(lambda cache: cache.layers[:1])
    assert watched(lambda cache: cache.layers.append("d"))
    assert watched(lambda cache: cache.layers.__setitem__(1, "d"))


def test_layers_that_are_added_stay() -> None:
    cache = SimpleNamespace(layers=["a"])
    layer = CachedLayer.of(cache, 0)
    assert layer is not None
    with layer.watched(nn.Module()):
        cache.layers.append("b")
    assert cache.layers == ["a", "b"]
    assert CachedLayer.of(cache, 2) is None


def test_caches_are_those_with_layers() -> None:
    assert is_cache(DynamicCache())
    assert not any(map(is_cache, (None, {}, nn.Linear(1, 1), SimpleNamespace(layers=[]))))
