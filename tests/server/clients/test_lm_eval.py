"""lm-eval's models `local-completions` and `local-chat-completions`: likelihoods of texts, and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.live import MODEL
from tests.server.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make clients installs it")
pytest.importorskip("tenacity", reason="lm-eval's client is not installed: make clients installs lm-eval[api]")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.api_models import JsonChatStr

pytestmark = pytest.mark.slow
PAIRS = [("the cat", " sat"), ("the cat", " is"), ("a", "b"), ("the cat", "\x17")]
BATCHED: dict[str, Any] = {"batch_size": 4, "num_concurrent": 2}


def asked(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def texts(url: str, folder: Path, **more: Any) -> Any:
    base = {"model": MODEL, "base_url": f"{url}/v1/completions", "max_retries": 1, "max_length": 512}
    return get_model("local-completions")(**base, tokenizer_backend="huggingface", tokenizer=str(folder), **more)


def likelihood(context: str, continuation: str) -> tuple[float, bool]:
    """The model's own, by one forward."""
    ids = [*tiny_tokenizer().encode(context), *(after := tiny_tokenizer().encode(continuation))]
    with torch.no_grad():
        scores = tiny_model()(torch.tensor([ids])).logits[0].log_softmax(-1)[-len(after) - 1 : -1]
    found = scores[range(len(after)), after].sum().item()
    return found, scores.argmax(-1).tolist() == after


@pytest.mark.parametrize("more", [{}, BATCHED, {"tokenized_requests": False}])
def test_likelihoods_are_the_model_s_own(url: str, tokenizer_folder: Path, more: dict[str, Any]) -> None:
    model = texts(url, tokenizer_folder, **more)
    found = model.loglikelihood(asked("loglikelihood", *PAIRS), disable_tqdm=True)
    for (value, greedy), (wanted, best) in zip(found, (likelihood(*pair) for pair in PAIRS)):
        assert value == pytest.approx(wanted, abs=1e-3)
        assert greedy == best
    rolling = asked("loglikelihood_rolling", ("the cat sat on the mat",))
    (whole,) = model.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert whole == pytest.approx(likelihood("<|end|>", "the cat sat on the mat")[0], abs=1e-3)


@pytest.mark.parametrize("more", [{}, BATCHED])
def test_texts_end_where_they_are_said_to(url: str, tokenizer_folder: Path, more: dict[str, Any]) -> None:
    model = texts(url, tokenizer_folder, **more)
    until = {"until": ["m"], "max_gen_toks": 6}
    cut, whole = model.generate_until(
        asked("generate_until", ("the cat", until), ("the cat", {**until, "until": ["Q"]})), disable_tqdm=True
    )
    assert (cut, len(whole) > 1) == (whole.split("m")[0], True)


def test_chats(url: str) -> None:
    base = {"model": MODEL, "base_url": f"{url}/v1/chat/completions", "max_retries": 1, "num_concurrent": 2}
    model = get_model("local-chat-completions")(**base)
    message = {"role": "user", "content": "hi"}
    chats = [model.apply_chat_template([message]), JsonChatStr(json.dumps([{**message, "type": "text"}]))]
    until = {"until": ["Q"], "max_gen_toks": 6}
    one, other = model.generate_until(asked("generate_until", *((chat, until) for chat in chats)), disable_tqdm=True)
    assert one == other != ""
