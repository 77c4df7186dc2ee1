"""Models with recurrent states in the engine: right tokens, the same alone and in a batch, whatever happens there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.dispatch import dispatch_model
from bigmodel.errors import ServeError
from bigmodel.server.engine import Delta, Done, Engine, EngineOptions, build_engine
from bigmodel.server.engine.compute.choose_runner import RunnerChoice
from bigmodel.server.engine.compute.runner import PackedRunner
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from bigmodel.server.loading import load
from tests.examples import alike
from tests.server import oracle
from tests.server.tiny import Collector, ask, make_request, tiny_engine, tiny_tokenizer

from .test_engine import everything, prompts, settings

B = PROMPT_BLOCK
COMMON: dict[str, Any] = {"vocab_size": 261, "hidden_size": 32, "initializer_range": 0.3}
ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
HEADS: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def mamba() -> Any:
    return transformers.MambaConfig(**COMMON, num_hidden_layers=2, state_size=4)


def falcon_mamba() -> Any:
    """Mamba with norms of what its state takes and gives."""
    return transformers.FalconMambaConfig(**COMMON, num_hidden_layers=2, state_size=4)


def mamba2() -> Any:
    sizes: dict[str, Any] = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16}
    return transformers.Mamba2Config(**COMMON, num_hidden_layers=2, **sizes)


def falcon_h1() -> Any:
    """Attention and Mamba side by side in each layer."""
    sizes = {**HEADS, "mamba_n_heads": 4, "mamba_d_ssm": 32}
    return transformers.FalconH1Config(**COMMON, **ATTENTION, **sizes, num_hidden_layers=2)


def lfm2() -> Any:
    """Short convolutions, and attention in every second layer."""
    return transformers.Lfm2Config(**COMMON, **ATTENTION, num_hidden_layers=2, layer_types=["conv", "full_attention"])


def bamba() -> Any:
    return transformers.BambaConfig(**COMMON, **ATTENTION, **HEADS, num_hidden_layers=2, attn_layer_indices=[1])


def qwen3_next() -> Any:
    """Linear attention by the delta rule, attention in one layer of two, experts."""
    return transformers.Qwen3NextConfig(**COMMON, **ATTENTION, **DELTA, **EXPERTS, num_hidden_layers=2, head_dim=8)


def qwen3_5() -> Any:
    """Qwen3-Next's layers with projections of their own for each of their inputs, and no experts."""
    return transformers.Qwen3_5TextConfig(**COMMON, **ATTENTION, **DELTA, num_hidden_layers=2, head_dim=8)


def qwen3_5_moe() -> Any:
    return transformers.Qwen3_5MoeTextConfig(**COMMON, **ATTENTION, **DELTA, **EXPERTS, num_hidden_layers=2, head_dim=8)


def jamba() -> Any:
    sizes = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2}
    return transformers.JambaConfig(
        **COMMON, **ATTENTION, **sizes, num_hidden_layers=2, mamba_d_state=4, mamba_dt_rank=4
    )


def zamba() -> Any:
    """Mamba of several heads in each layer, and attention in every second, whose one module these layers share."""
    attention = {**ATTENTION, "num_key_value_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16}
    sizes: dict[str, Any] = {"mamba_d_state": 4, "n_mamba_heads": 2, "mamba_dt_rank": 4}
    common = {**COMMON, "initializer_range": 0.1}
    return transformers.ZambaConfig(
        **common, **attention, **sizes, layers_block_type=["mamba", "hybrid"] * 2, num_hidden_layers=4
    )


def zamba2() -> Any:
    """Mamba in each layer, and attention in every second, whose one module these layers share."""
    sizes: dict[str, Any] = {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 16}
    attention = {**ATTENTION, "num_key_value_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16}
    shared = {"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "adapter_rank": 16}
    common = {**COMMON, "initializer_range": 0.1}  # with more, the last bits of one layer are large after the next
    return transformers.Zamba2Config(**common, **attention, **sizes, **shared, num_hidden_layers=4)


goes_on = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="Mamba of this transformers does not go on from a state with several tokens: computed one by one",
)
MAMBA, FALCON_MAMBA, JAMBA, ZAMBA = SCANNED = tuple(
    pytest.param(make, marks=goes_on) for make in (mamba, falcon_mamba, jamba, zamba)
)
MAMBA2, FALCON_H1, ZAMBA2 = (pytest.param(make, marks=goes_on) for make in (mamba2, falcon_h1, zamba2))
MIXTURES = (qwen3_next, JAMBA, qwen3_5_moe)
ALL = (MAMBA, FALCON_MAMBA, MAMBA2, FALCON_H1, lfm2, bamba, qwen3_5, *MIXTURES, ZAMBA, ZAMBA2)
LIKE_OTHERS = (falcon_mamba, zamba, zamba2, falcon_h1, bamba)
"""Whose states are those of another one's: what happens to a batch is tried with these by `-m long`."""


def built(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(make()).eval()


def choice(make: Callable[[], Any]) -> RunnerChoice:
    """What an engine over the model on the host finds out about it: on accelerators it takes many forwards."""
    engine = tiny_engine(built(make))
    engine.stop()
    return RunnerChoice.of(engine.core.runner)


def alone(engine: Engine, asked: list[list[int]], tokens: int) -> list[Any]:
    found = []
    for index, prompt in enumerate(asked):
        collector = ask(engine, prompt, max_tokens=tokens, **settings(index))
        collector.wait()
        found.append(everything(collector))
    return found


def together(engine: Engine, asked: list[list[int]], tokens: int) -> list[Any]:
    collectors = [ask(engine, p, max_tokens=tokens, **settings(index)) for index, p in enumerate(asked)]
    for collector in collectors:
        collector.wait()
    return [everything(collector) for collector in collectors]


@pytest.mark.slow
@alike(
    "make",
    [lfm2, MAMBA, MAMBA2, FALCON_H1, qwen3_5, qwen3_next, ZAMBA2, JAMBA, qwen3_5_moe, FALCON_MAMBA, ZAMBA, bamba],
    first=1,
)
def test_sequences_of_a_batch_have_the_tokens_of_the_model_alone(make: Callable[[], Any]) -> None:
    model = built(make)
    engine = tiny_engine(model)
    assert isinstance(engine.core.runner, PackedRunner)
    asked = prompts(2, 2 * B)
    collectors = [ask(engine, p, max_tokens=4, temperature=0, ignore_eos=True) for p in asked]
    for prompt, collector in zip(asked, collectors, strict=True):
        collector.wait()
        params = make_request(prompt, max_tokens=4, temperature=0, ignore_eos=True).params
        assert collector.tokens() == oracle.generate(model, tiny_tokenizer(), prompt, params)
    engine.stop()


@pytest.mark.slow
@alike(
    "make",
    [lfm2, MAMBA, MAMBA2, qwen3_5, *(pytest.param(make, marks=goes_on) for make in LIKE_OTHERS)],
    first=1,
)
def test_bits_do_not_depend_on_the_batch_on_chunks_or_on_preemption(make: Callable[[], Any]) -> None:
    model = built(make)
    engine = tiny_engine(model, prefix_cache=False)
    lengths = (B - 4, 2 * B - 4, B - 2, 3 * B + 5, B - 4)  # whose answers need another block of memory
    asked = [[(7 * place + number) % 251 for place in range(length)] for number, length in enumerate(lengths)]
    expected = alone(engine, asked, 6)
    assert together(engine, asked, 6) == expected
    engine.stop()
    tight = tiny_engine(built(make), prefix_cache=False, max_batch_tokens=2 * B)
    tight.core.scheduler.pool.capacity = 8 * B
    assert together(tight, asked, 6) == expected
    assert tight.core.scheduler.preemptions
    tight.stop()


@pytest.mark.slow
@alike("make", ALL, first=len(ALL) - 2)
def test_long_prompts_are_computed_in_blocks(make: Callable[[], Any]) -> None:
    model = built(make)
    engine = tiny_engine(model)
    runner: Any = engine.core.runner
    asked = [(7 * place) % 251 for place in range(3 * B + 5)]
    with torch.no_grad():
        expected = built(make)(input_ids=torch.tensor([asked])).logits[0, -1]
    (found,), _ = runner.last_logits([asked])
    assert (runner.mixers.continues, runner.name) == (True, "packed")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    engine.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        *(MAMBA, MAMBA2, FALCON_H1, lfm2, qwen3_5),
        *(pytest.param(make, marks=[goes_on, pytest.mark.long]) for make in (zamba, zamba2)),
    ],
)
def test_a_prompt_goes_on_from_the_last_block_of_an_earlier_one(make: Callable[[], Any]) -> None:
    model = built(make)
    (prompt, *_) = prompts(1, 10 * B)
    prompt = (prompt * 10)[: 3 * B + 7]
    asked = [prompt, [*prompt, *range(1, 90)], prompt]
    plain, engine = tiny_engine(model, prefix_cache=False), tiny_engine(built(make))
    assert alone(engine, asked, 4) == alone(plain, asked, 4)
    assert engine.core.scheduler.prefix.hits == 6 * B
    for each in (plain, engine):
        each.stop()


def greedy(engine: Engine, asked: list[list[int]], tokens: int) -> list[Collector]:
    """Submit all prompts at once, and wait for them."""
    collectors = [ask(engine, p, max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=0) for p in asked]
    for collector in collectors:
        assert isinstance(collector.wait(), Done)
    return collectors


def assert_alike(found: list[Collector], expected: list[Collector]) -> None:
    """An expert computes its tokens of all sequences together, so the last bits depend on how many those are."""
    for one, other in zip(found, expected, strict=True):
        assert one.tokens() == other.tokens()
        assert [each.logprob for each in logprobs(one)] == pytest.approx(
            [each.logprob for each in logprobs(other)], abs=1e-3
        )


def logprobs(collector: Collector) -> list[Any]:
    return [entry for event in collector.events if isinstance(event, Delta) for entry in event.logprobs or ()]


@pytest.mark.slow
@alike("make", (JAMBA, qwen3_next, qwen3_5_moe), 1)
def test_tokens_of_a_mixture_do_not_depend_on_the_batch_on_chunks_or_on_preemption(make: Callable[[], Any]) -> None:
    engine = tiny_engine(built(make), prefix_cache=False)
    lengths = (B - 4, 2 * B - 4, B - 2, 3 * B + 5, B - 4)
    asked = [[(7 * place + number) % 251 for place in range(length)] for number, length in enumerate(lengths)]
    expected = [greedy(engine, [prompt], 6)[0] for prompt in asked]
    assert_alike(greedy(engine, asked, 6), expected)
    engine.stop()
    tight = tiny_engine(built(make), prefix_cache=False, max_batch_tokens=2 * B)
    tight.core.scheduler.pool.capacity = 8 * B
    assert_alike(greedy(tight, asked, 6), expected)
    assert tight.core.scheduler.preemptions
    tight.stop()


@pytest.mark.slow
@alike("make", MIXTURES, 2)
def test_a_prompt_of_a_mixture_goes_on_from_the_last_block_of_an_earlier_one(make: Callable[[], Any]) -> None:
    (prompt, *_) = prompts(1, 10 * B)
    prompt = (prompt * 10)[: 3 * B + 7]
    plain, engine = tiny_engine(built(make), prefix_cache=False), tiny_engine(built(make))
    for number, each in enumerate((prompt, [*prompt, *range(1, 90)], prompt)):
        assert_alike(greedy(engine, [each], 4), greedy(plain, [each], 4))
        assert engine.core.scheduler.prefix.hits == number * 3 * B
    for each_engine in (plain, engine):
        each_engine.stop()


@pytest.mark.slow
@goes_on
def test_where_prompts_part_the_third_one_goes_on_from_what_the_second_one_kept() -> None:
    model = built(mamba2)
    common = [(7 * place) % 251 for place in range(2 * B)]
    asked = [[*common, *[number] * (B + 9)] for number in (1, 2, 3)]
    plain, engine = tiny_engine(model, prefix_cache=False), tiny_engine(built(mamba2))
    hits = []
    for number, prompt in enumerate(asked):
        assert alone(engine, [prompt], 3) == alone(plain, [prompt], 3), number
        hits.append(engine.core.scheduler.prefix.hits)
    assert hits == [0, 0, 2 * B]
    for each in (plain, engine):
        each.stop()


@pytest.mark.slow
def test_a_step_that_fails_ends_one_sequence_and_the_others_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(bamba)
    engine = tiny_engine(model)
    asked = prompts(3, B)
    expected = alone(engine, asked, 6)
    runner: Any = engine.core.runner
    compute, failures = runner.compute, iter([False] * 3 + [True])

    def failing(batch: Any) -> Any:
        found = compute(batch)
        if len(batch) == 3 and next(failures, False):
            raise RuntimeError("after the states were written")
        return found

    monkeypatch.setattr(runner, "compute", failing)
    assert together(engine, asked, 6) == expected
    assert next(failures, None) is None
    engine.stop()


@pytest.mark.slow
def test_what_cannot_be_served_with_recurrent_states_is_refused() -> None:
    with pytest.raises(ServeError, match="cannot be taken out of this model's recurrent states"):
        tiny_engine(built(bamba), prompt_lookup=3)
    with pytest.raises(ServeError, match="do not hold recurrent states of 8 sequences"):
        tiny_engine(built(bamba), kv_bytes=20_000, max_sequences=8)
    with pytest.raises(ServeError, match="folder for the prefix cache holds keys and values"):
        tiny_engine(built(bamba), prefix_folder=Path("somewhere"))


@pytest.mark.slow
@pytest.mark.parametrize("make", [mamba2, pytest.param(qwen3_next, marks=pytest.mark.long)])
def test_an_accelerator_keeps_to_its_budget_with_states_of_more_sequences_than_planned(
    make: Callable[[], Any], tmp_path: Path, accelerators: None
) -> None:
    built(make).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    options: Any = {"max_memory": {0: "12MiB", "cpu": "1GiB"}, "device_map": "sequential"}
    placed = load(str(tmp_path), **options, batch_size=2, context_length=300)
    entry = placed.plan.devices[0]
    assert set(placed.plan.device_map.values()) == {0}
    limits = EngineOptions(max_sequences=4)
    engine = build_engine(placed.model, tiny_tokenizer(), placed.plan, limits, known_runner=choice(make))
    gc.collect()
    reset_peak_memory(0)
    engine.start()
    asked = [[(7 * place + number) % 251 for place in range(B + 9 + number)] for number in range(5)]
    collectors = [ask(engine, prompt, max_tokens=4, ignore_eos=True) for prompt in asked]
    for collector in collectors:
        assert isinstance(collector.wait(), Done)
    engine.stop()
    assert max_memory_allocated(0) <= entry.budget


@pytest.mark.slow
@alike("make", [lfm2, mamba, zamba2], first=1)
def test_streamed_layers_give_the_same_bits(make: Callable[[], Any], accelerators: None) -> None:
    found = []
    for home in ("virtual:0", "cpu"):
        model = built(make)
        places = {name: "virtual:0" for name, _ in model.named_children()} | {
            "model": "virtual:0",
            "model.layers": home,
        }
        dispatch_model(model, places, main_device="virtual:0")
        engine = tiny_engine(model, known_runner=choice(make))
        found.append(together(engine, prompts(2, 60), 3))
        engine.stop()
    assert found[0] == found[1]


def test_states_leave_fewer_positions_for_keys_and_values() -> None:
    engine = tiny_engine(built(bamba), kv_bytes=4 * 2**20, max_sequences=4)
    runner: Any = engine.core.runner
    (held,), (of_layer,) = (each.values() for each in runner.states)
    (per_token,) = runner.bytes_per_token().values()
    taken = 8 * held + 4 * of_layer  # four of the sequences, four that are kept; a layer's are copied at a time
    assert engine.core.scheduler.pool.capacity == (4 * 2**20 - taken) // per_token // B * B
    engine.stop()
