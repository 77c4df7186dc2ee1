"""A dry run that repeats blocks that are alike records what one that runs them all records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from bigmodel.profile.profile import Profile, profile_model
from bigmodel.profile.trace import repeat
from bigmodel.profile.trace.repeat import NotRepeating, Repeats

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8, "moe_intermediate_size": 16, "pad_token_id": 0,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Llama", {}),
    "biases": ("Qwen2", {}),
    "mixture": ("Mixtral", {"num_local_experts": 4}),
    "dense layers, then mixtures": (
        "DeepseekV3",
        {
            "first_k_dense_replace": 3, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
            "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
            "head_dim": 4, "num_key_value_heads": 4,
            "num_hidden_layers": 10,
        },
    ),
    "every other layer a mixture": (
        "Qwen3Moe",
        {"decoder_sparse_step": 2, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 12},
    ),
    "windows": ("Mistral", {"sliding_window": 16}),
    "windows in some layers": ("Gemma2", {"sliding_window": 16, "num_hidden_layers": 12}),
    "windows in most layers": ("Gemma3", {"sliding_window": 16, "num_hidden_layers": 14}),
    "recurrent states": ("Mamba", {"state_size": 4}),
    "old positions": ("GPT2", {"n_embd": 32, "n_layer": 8, "n_head": 4}),
    "parallel attention": ("GPTNeoX", {}),
    "learned positions": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}  # fmt: skip


@pytest.fixture
def repetitions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The units that were repeated, in order."""
    found: list[int] = []
    before = Repeats._repeat

    def noting(self: Repeats, recorded: Any, call: Any, unit: int) -> Any:
        found.append(unit)
        return before(self, recorded, call, unit)

    monkeypatch.setattr(Repeats, "_repeat", noting)
    return found


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Profile]:
    """Returns the profile by a dry run that repeats nothing."""

    def profile(model: nn.Module, **shapes: Any) -> Profile:
        with monkeypatch.context() as patched:
            patched.setattr(repeat, "FEWEST", 10**6)
            return profile_model(model, **shapes)

    return profile


def causal(kind: str, **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    with torch.device("meta"):
        name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        return getattr(transformers, name)(config(**{**SIZES, **sizes}))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeating_dry_run_records_what_a_whole_one_does(
    family: str, whole: Callable[..., Profile], repetitions: list[int]
) -> None:
    kind, sizes = FAMILIES[family]
    model = causal(kind, **sizes)
    for shapes in ({"context_length": 40, "batch_size": 2}, {"context_length": 33, "new_tokens": 9, "padded": False}):
        assert profile_model(model, **shapes) == whole(model, **shapes)  # type: ignore[arg-type]
    if kind != "Mamba":
        assert repetitions


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["static", None])
def test_other_caches_and_none_give_the_same_record(
    cache: str | None, whole: Callable[..., Profile], repetitions: list[int]
) -> None:
    model = causal("Llama")
    assert profile_model(model, context_length=24, cache=cache) == whole(model, context_length=24, cache=cache)


@pytest.mark.slow
def test_encoders_and_decoders_are_repeated_apart(whole: Callable[..., Profile], repetitions: list[int]) -> None:
    with torch.device("meta"):
        model = transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                d_model=32,
                encoder_layers=8,
                decoder_layers=8,
                encoder_ffn_dim=48,
                decoder_ffn_dim=48,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                vocab_size=64,
                max_position_embeddings=64,
            )
        )
    assert profile_model(model, context_length=24) == whole(model, context_length=24)
    assert repetitions


class Block(nn.Module):
    """A block of a plain model."""

    def __init__(self, number: int, seen: list[Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.layer_idx, self.seen = number, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Listing(Block):
    """Appends a tensor to a list that all blocks share."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(super().forward(x))
        return x * len(self.seen)


class Keeping(Block):
    """Keeps a tensor on itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = super().forward(x)
        return self.kept + 1


class Differing(Block):
    """Reads an attribute that differs between neighbours."""

    def __init__(self, number: int, seen: list[Any]) -> None:
        super().__init__(number, seen)
        self.times = {"wide": number % 3 + 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([super().forward(x)] * self.times["wide"])
        return wide[: x.shape[0]].clone()


class Indexed(Block):
    """Chooses a shape by its number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([super().forward(x)] * (3 if self.layer_idx == 1 else 1))
        return wide[: x.shape[0]].clone()


class Tabled(Block):
    """Chooses a shape from a table by its number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([super().forward(x)] * (1, 4, 1, 1, 1, 1, 1, 1)[self.layer_idx])
        return wide[: x.shape[0]].clone()


class Counting(Block):
    """Counts its calls in a forward of the model outside of itself."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.count += 1
        wide = torch.cat([super().forward(x)] * Counting.count)
        return wide[: x.shape[0]].clone()


class Plain(nn.Module):
    """A model of eight blocks."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(kind(number, self.seen) for number in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.count = 0
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", [Block, Listing, Keeping, Differing, Indexed, Tabled, Counting])
def test_blocks_that_are_not_understood_run_each_time(
    kind: type[Block], whole: Callable[..., Profile], repetitions: list[int]
) -> None:
    shapes = {"sample_inputs": {"x": torch.zeros(4, 16)}}
    found = profile_model(Plain(kind), **shapes)  # type: ignore[arg-type]
    wanted = whole(Plain(kind), **shapes)
    assert dataclasses.replace(found, name="") == dataclasses.replace(wanted, name="")
    assert found.phases
    assert bool(repetitions) == (kind in (Block, Counting))


def test_the_last_block_of_a_kind_is_held_against_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts calls outside of modules is not seen; the last block tells."""
    raised: list[NotRepeating] = []

    class Noted(NotRepeating):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            raised.append(self)

    monkeypatch.setattr(repeat, "NotRepeating", Noted)
    profile_model(Plain(Counting), sample_inputs={"x": torch.zeros(4, 16)})
    assert raised


def test_hooks_on_blocks_and_within_them_run_each_time(whole: Callable[..., Profile], repetitions: list[int]) -> None:
    caught: list[torch.Tensor] = []
    model = Plain(Block)
    for block in model.blocks.children():
        block.get_submodule("inner").register_forward_hook(lambda _module, _args, output: caught.append(output))
    shapes = {"sample_inputs": {"x": torch.zeros(4, 16)}}
    found = profile_model(model, **shapes)  # type: ignore[arg-type]
    caught.clear()
    assert found == whole(model, **shapes)
    assert not repetitions
