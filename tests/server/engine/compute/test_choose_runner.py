"""Both runners compute what the model computes by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from bigmodel.server.engine.compute.choose_runner import RunnerChoice, choose_runner
from bigmodel.server.engine.compute.plain import PlainRunner
from bigmodel.server.engine.compute.runner import PackedRunner, Runner
from bigmodel.server.engine.kv.buffers import SequenceKV
from bigmodel.server.engine.scheduling.request import Sequence
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens
from tests.server.tiny import make_request, tiny_model

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def build(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "mistral with a window": lambda: transformers.MistralConfig(**SMALL, sliding_window=4),
    "gemma2 with soft caps": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.2
    ),
    "phi": lambda: transformers.PhiConfig(**SMALL),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "deepseek_v3, which caches latents": lambda: transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16,
        first_k_dense_replace=1
    ),
    "gpt-oss with sinks": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0
        }
    ),
}  # fmt: skip


MAMBA = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
BLOOM = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)


def sequence(prompt: list[int], **params: Any) -> Sequence:
    made = make_request(prompt, **params).sequences[0]
    made.kv = SequenceKV()
    made.kv.reserve(512)
    return made


def step(runner: Runner, *batch: tuple[Sequence, int]) -> list[torch.Tensor | None]:
    """Run batch and count them as computed."""
    logits = runner.run([ScheduledTokens(s, n) for s, n in batch])
    for s, n in batch:
        s.computed += n
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_gives_each_sequence_its_own_logits(family: str) -> None:
    model = build(FAMILIES[family]())
    if family.startswith("gemma2") and type(model)._supports_sdpa:
        pytest.skip("this version of transformers computes Gemma 2 without soft caps where PyTorch attends")
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [5]]
    new = [11, 12, 13]
    with torch.no_grad():
        whole = [model(input_ids=torch.tensor([p + new])).logits[0] for p in prompts]
    runner = choose_runner(model)
    assert isinstance(runner, PackedRunner), "expected to run packed"
    a, b, c = (sequence(p) for p in prompts)
    first = step(runner, (a, 3), (b, 10))
    torch.testing.assert_close(first[1][0], whole[1][9], atol=1e-4, rtol=1e-4)  # type: ignore[index]
    for at in range(3):
        a.output.append(new[at])
        b.output.append(new[at])
        logits = step(runner, (a, 1), (b, 1), *([(c, 1)] if at == 0 else []))
        torch.testing.assert_close(logits[0][0], whole[0][3 + at], atol=1e-4, rtol=1e-4)  # type: ignore[index]
        torch.testing.assert_close(logits[1][0], whole[1][10 + at], atol=1e-4, rtol=1e-4)  # type: ignore[index]
        if at == 0:
            torch.testing.assert_close(logits[2][0], whole[2][0], atol=1e-4, rtol=1e-4)  # type: ignore[index]


def test_a_model_without_replaceable_attention_runs_sequences_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    runner = choose_runner(build(BLOOM))
    assert isinstance(runner, PlainRunner)
    assert "one by one" in caplog.text


@pytest.mark.parametrize("make", [PackedRunner, PlainRunner])
def test_prompt_logprobs_get_all_rows_and_unfinished_prompts_none(make: Callable[[Any], Runner]) -> None:
    runner = make(tiny_model())
    plain, scored = sequence(list(range(10))), sequence(list(range(10)), prompt_logprobs=True)
    first = step(runner, (plain, 4), (scored, 4))
    assert first[0] is None
    assert first[1] is not None
    assert first[1].shape[0] == 4
    second = step(runner, (plain, 6), (scored, 6))
    assert [None if rows is None else rows.shape[0] for rows in second] == [1, 6]


@pytest.mark.parametrize("make", [PackedRunner, PlainRunner])
def test_bytes_per_token_are_those_of_the_model(make: Callable[[Any], Runner]) -> None:
    # two layers, keys and values, two heads of 16 numbers of 4 bytes
    assert make(tiny_model()).bytes_per_token() == {"cpu": 2 * 2 * 2 * 16 * 4}


@pytest.mark.parametrize(
    ("make", "kind"),
    [(tiny_model, PackedRunner), (lambda: build(MAMBA), PackedRunner), (lambda: build(BLOOM), PlainRunner)],
)
def test_what_was_chosen_before_is_not_checked_again(
    make: Callable[[], torch.nn.Module], kind: type[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check computes the whole model several times, and streams what is streamed."""
    model = make()
    choice = RunnerChoice.of(choose_runner(model))
    monkeypatch.setattr(type(model), "__call__", lambda *_, **__: pytest.fail("it computes"))
    again = choose_runner(model, known=choice)
    assert isinstance(again, kind)
    assert RunnerChoice.of(again) == choice


def test_the_model_still_works_by_itself_afterwards() -> None:
    model = tiny_model()
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        PackedRunner(model)
        assert torch.equal(model(input_ids=ids).logits, before)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0), tokens)
