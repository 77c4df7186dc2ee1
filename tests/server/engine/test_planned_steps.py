"""An engine planned for its steps: weights stay where whole prompts would leave them no memory, and budgets hold."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import transformers as t

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.plan import make_plan
from bigmodel.server import Loaded
from bigmodel.server.engine import EngineOptions, build_engine
from bigmodel.server.engine.budget import planned_chunk
from bigmodel.server.loading import load
from tests.server.tiny import ask, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.usefixtures("accelerators"), pytest.mark.slow]

CONTEXT, SEQUENCES = 384, 4
OPTIONS = EngineOptions(max_sequences=SEQUENCES, max_batch_tokens=192)
LONG = [
    ("llama", 0.95),
    ("gemma3", 0.95),
    ("gpt-oss", 0.95),
    ("qwen3-moe", 1.0),
    ("qwen3-moe", 0.95),
    ("qwen3-next", 1.0),
    ("qwen3-next", 0.95),
]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 1024, "head_dim": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def family(name: str) -> Any:
    if name == "llama":
        return tiny_model(num_hidden_layers=4)
    if name == "gemma3":  # windows
        return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, sliding_window=48))
    if name == "gpt-oss":  # sinks, windows, experts
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return t.GptOssForCausalLM(t.GptOssConfig(**SIZES, **experts, sliding_window=48))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if name == "qwen3-moe":
        return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**SIZES, **experts))
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    config = t.Qwen3NextConfig(**SIZES, **experts, **linear, linear_value_head_dim=16)
    return t.Qwen3NextForCausalLM(config)


def saved(name: str, folder: Path) -> Path:
    family(name).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def loaded(folder: Path, budget: int, chunk: int) -> Loaded:
    budgets: Any = {0: budget, "cpu": "1GiB"}
    return load(
        str(folder),
        max_memory=budgets,
        batch_size=SEQUENCES,
        context_length=CONTEXT,
        padded=False,
        prefill_chunk_size=chunk,
    )


def total_of(folder: Path, chunk: int | None) -> int:
    """Return the bytes on the accelerator of a plan that has all weights there."""
    shapes: Any = {"batch_size": SEQUENCES, "context_length": CONTEXT, "padded": False, "prefill_chunk_size": chunk}
    return make_plan(str(folder), {0: "1GiB", "cpu": "1GiB"}, per_pass=False, **shapes).devices[0].total


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("llama", 1.0),
        *(pytest.param(*each, marks=pytest.mark.long) for each in LONG),
    ],
)
def test_steps_keep_to_a_plan_that_is_far_below_that_of_whole_prompts(tmp_path: Path, name: str, share: float) -> None:
    folder = saved(name, tmp_path)
    chunk = planned_chunk(OPTIONS, SEQUENCES)
    total = total_of(folder, chunk)
    if share == 1.0:
        assert total < 0.7 * total_of(folder, None)
    placed = loaded(folder, int(share * total), chunk)
    assert bool(placed.plan.streamed or placed.plan.kv_on_host) == (share < 1)
    made = build_engine(placed.model, placed.tokenizer, placed.plan, OPTIONS)
    gc.collect()
    reset_peak_memory(0)
    made.start()
    prompts = ["the cat sat on the mat " * repeats for repeats in (15, 12, 3, 15)]
    for each in [ask(made, prompt, max_tokens=3, ignore_eos=True) for prompt in prompts]:
        each.wait()
    made.stop()
    assert max_memory_allocated(0) <= placed.plan.devices[0].total <= int(share * total)


def test_logits_of_a_whole_prompt_keep_to_the_plan(tmp_path: Path) -> None:
    """Log-probabilities of a prompt need the logits of each of its rows, and plans count those of one row a text."""
    folder = tmp_path
    tiny_model(vocab_size=8192).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    chunk = planned_chunk(OPTIONS, SEQUENCES)
    placed = loaded(folder, total_of(folder, chunk), chunk)
    made = build_engine(placed.model, placed.tokenizer, placed.plan, OPTIONS)
    gc.collect()
    reset_peak_memory(0)
    made.start()
    answers = [ask(made, "the cat sat on the mat " * 15, max_tokens=2, prompt_logprobs=True, logprobs=1) for _ in "ab"]
    for each in answers:
        each.wait()
    made.stop()
    assert max_memory_allocated(0) <= placed.plan.devices[0].total
