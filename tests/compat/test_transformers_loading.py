"""transformers' own `from_pretrained`, `generate` and `Trainer` under the stand-in."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from .answers import preloaded_answers

pytestmark = pytest.mark.slow  # a server of preloaded programs imports transformers
MODULES = (
    "transformers.trainer",
    "transformers.pipelines",
    "transformers.models.llama.modeling_llama",
    "torchao.quantization",
)


@cache
def found() -> dict[str, Any]:
    return preloaded_answers("transformers_models", modules=MODULES)


def test_auto_is_planned_here_and_reported() -> None:
    assert found()["places"] == ["0", "cpu"]
    assert "parts are streamed through" in found()["plan"]
    assert "1 x 64 tokens" in found()["plan"]


def test_host_weights_are_views_of_the_checkpoint() -> None:
    assert found()["host weights are mapped"]


@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_weights_that_the_host_computes_with_view_the_file_however_it_aligns_them(place: str) -> None:
    assert found()[f"{place}: misaligned"]
    assert found()[f"{place}: views of the file"]
    assert found()[f"{place}: views after a forward"]
    assert found()[f"{place}: logits"]


def test_the_budget_holds_and_tokens_are_those_of_the_whole_model() -> None:
    assert found()["peak"]
    assert found()["tokens"]


def test_the_model_says_where_it_runs() -> None:
    assert found()["execution device"] == "virtual:0"


def test_a_given_map_is_kept() -> None:
    assert found()["given map"]


def test_weights_on_disk_keep_the_files_dtype_and_are_cast_where_they_run() -> None:
    assert found()["disk keeps its dtype"] == "torch.float32"
    assert found()["cast where it runs"] == "torch.bfloat16"
    assert found()["tokens in bfloat16"]


def test_pipelines_take_it() -> None:
    assert found()["pipeline"]
    assert found()["pipeline from disk"]


def test_transformers_quantisers_give_what_they_give_without_a_map_or_one_line() -> None:
    same = {
        question: answer for question, answer in found().items() if question.startswith(("torchao", "bitsandbytes"))
    }
    assert same == dict.fromkeys(same, True)
    assert {"torchao, auto", "torchao, {'': 'cpu'}"} <= same.keys()
    assert "is a tensor of several parts" in found()["quantised and streamed"]


def test_the_trainer_trains_and_resumes() -> None:
    assert len(found()["losses"]) == 4
    assert found()["resumed"]


def test_every_seam_is_in_place() -> None:
    seams = [line for line in found()["report"].splitlines() if "transformers.modeling_utils" in line]
    assert len(seams) == 3
    assert all(line.endswith(": in place") for line in seams)
