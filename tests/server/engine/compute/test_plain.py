"""A forward for each sequence computes what the model computes by itself."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.server.engine.compute.attention import PART_ROWS
from bigmodel.server.engine.compute.plain import PlainRunner
from bigmodel.server.engine.compute.runner import PackedRunner
from bigmodel.server.engine.kv.buffers import SequenceKV
from bigmodel.server.engine.scheduling.request import Sequence
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens
from tests.server.tiny import make_request, tiny_model


def running(prompt: list[int], **params: Any) -> Sequence:
    sequence = make_request(prompt, **params).sequences[0]
    sequence.kv = SequenceKV()
    return sequence


def by_itself(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("cached", [True, False])
def test_a_prompt_in_two_chunks_and_one_decoded_token(cached: bool) -> None:
    model = tiny_model()
    runner, sequence = PlainRunner(model, cached=cached), running([5, 6, 7, 8, 9])
    assert runner.run([ScheduledTokens(sequence, 3)]) == [None]  # the next token cannot be chosen yet
    sequence.computed = 3
    for tokens in (2, 1):
        (logits,) = runner.run([ScheduledTokens(sequence, tokens)])
        assert logits is not None
        torch.testing.assert_close(logits, by_itself(model, sequence.token_slice(0, len(sequence)))[-1:])
        sequence.computed += tokens
        sequence.output.append(11)


def test_logits_of_the_last_token_keep_no_others_in_memory() -> None:
    model, prompt = tiny_model(), [5, 6, 7, 8]
    last = PlainRunner(model, cached=False).last_logits(prompt)
    torch.testing.assert_close(last, by_itself(model, prompt)[-1])
    assert last.untyped_storage().nbytes() == last.nbytes


@pytest.mark.usefixtures("accelerators")
def test_rows_of_a_long_prompt_attend_in_parts_for_the_logits_of_its_last_token() -> None:
    model = tiny_model(layers=1).to("virtual:0")
    PackedRunner(model)  # from then on its attention is the engine's
    runner, prompt = PlainRunner(model, cached=False), [token % 7 for token in range(3 * PART_ROWS)]
    gc.collect()
    before = memory_allocated(0)
    reset_peak_memory(0)
    last = runner.last_logits(prompt)
    scores = 4 * len(prompt) * PART_ROWS * last.itemsize  # of as many heads
    assert max_memory_allocated(0) - before < 6 * scores
    torch.testing.assert_close(last, runner.forward(prompt)[-1])


def test_log_probabilities_of_a_prompt_need_all_its_logits() -> None:
    model = tiny_model()
    (logits,) = PlainRunner(model).run([ScheduledTokens(running([5, 6, 7], prompt_logprobs=True), 3)])
    assert logits is not None
    torch.testing.assert_close(logits, by_itself(model, [5, 6, 7]))


def test_bytes_per_token_are_those_of_keys_and_values() -> None:
    assert PlainRunner(tiny_model()).bytes_per_token() == {"cpu": 2 * 2 * 2 * 16 * 4}  # layers, k and v, heads, width


def test_bytes_per_token_are_positive_for_a_model_without_a_cache() -> None:
    assert PlainRunner(tiny_model(), cached=False).bytes_per_token() == {"cpu": 1}


def test_a_model_without_a_cache_recomputes_the_whole_text() -> None:
    model = transformers.AutoModelForMaskedLM.from_config(
        transformers.BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    )
    model.forward = lambda input_ids, **kwargs: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="takes no cache"):
        PlainRunner(model)
    PlainRunner(model, cached=False)
