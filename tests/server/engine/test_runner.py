"""What every runner needs to know of a model and a grant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel.server.engine.runner import input_device, readable, wants_all
from bigmodel.server.engine.scheduler import Grant
from tests.server.tiny import make_request, tiny_model


def test_all_logits_are_wanted_for_the_log_probabilities_of_a_prompt_only() -> None:
    (asked,), (plain,) = make_request([1], prompt_logprobs=True).sequences, make_request([1]).sequences
    assert wants_all(Grant(asked, 1))
    assert not wants_all(Grant(plain, 1))
    asked.output = [2]
    assert not wants_all(Grant(asked, 1))


def test_a_plain_model_takes_tokens_where_its_weights_are() -> None:
    assert input_device(tiny_model()) == torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_dispatched_model_takes_them_on_its_main_device(device: str, tmp_path: Path) -> None:
    from bigmodel.dispatch import from_pretrained

    tiny_model().save_pretrained(tmp_path)
    assert input_device(from_pretrained(tmp_path, device_map={"": device})) == torch.device("cpu")


def test_logits_on_the_host_are_read_where_they_are() -> None:
    logits = torch.zeros(2, 3)
    assert readable(logits) is logits
