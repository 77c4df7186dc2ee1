"""A packed step gives each sequence the logits it would get alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel.server.engine.compute.runner import PackedRunner, input_device, readable
from bigmodel.server.engine.kv.buffers import SequenceKV
from bigmodel.server.engine.scheduling.request import Sequence
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens
from tests.server.tiny import make_request, tiny_model


def test_a_plain_model_gets_tokens_on_the_device_of_its_weights() -> None:
    assert input_device(tiny_model()) == torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_dispatched_model_gets_tokens_on_its_main_device(device: str, tmp_path: Path) -> None:
    from bigmodel.dispatch import from_pretrained

    tiny_model().save_pretrained(tmp_path)
    assert input_device(from_pretrained(tmp_path, device_map={"": device})) == torch.device("cpu")


def test_logits_on_the_host_are_not_copied() -> None:
    logits = torch.zeros(2, 3)
    assert readable(logits) is logits


def running(prompt: list[int], **params: Any) -> Sequence:
    sequence = make_request(prompt, **params).sequences[0]
    sequence.kv = SequenceKV()
    sequence.kv.reserve(64)
    return sequence


def by_itself(tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = tiny_model()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("row_multiple", [1, 4])
def test_a_step_may_have_prompts_partial_prompts_and_drafts(row_multiple: int) -> None:
    runner = PackedRunner(tiny_model(), row_multiple=row_multiple, host_linear="torch")
    whole, half, drafted = running([5, 6, 7]), running([8, 9, 10, 11]), running([12])
    batch = [ScheduledTokens(whole, 3), ScheduledTokens(half, 2), ScheduledTokens(drafted, 1, draft=(13, 14))]
    first, second, third = runner.run(batch)
    assert second is None
    assert first is not None
    assert third is not None
    torch.testing.assert_close(first, by_itself([5, 6, 7])[-1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(third, by_itself([12, 13, 14]), atol=1e-4, rtol=1e-4)
    half.computed = 2
    (rest,) = runner.run([ScheduledTokens(half, 2)])
    assert rest is not None
    torch.testing.assert_close(rest, by_itself([8, 9, 10, 11])[-1:], atol=1e-4, rtol=1e-4)


def test_the_last_logits_of_several_prompts_come_from_one_forward() -> None:
    prompts = [[5, 6, 7], [8], [9, 10]]
    logits, layers = PackedRunner(tiny_model(), row_multiple=1, host_linear="torch").last_logits(prompts)
    assert layers == 2
    for prompt, found in zip(prompts, logits, strict=True):
        torch.testing.assert_close(found, by_itself(prompt)[-1], atol=1e-4, rtol=1e-4)


def test_bytes_per_token_are_those_of_keys_and_values() -> None:
    runner = PackedRunner(tiny_model(), row_multiple=1, host_linear="torch")
    assert runner.bytes_per_token() == {"cpu": 2 * 2 * 2 * 16 * 4}  # layers, k and v, heads, width, bytes
