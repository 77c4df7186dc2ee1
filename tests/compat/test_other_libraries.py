"""peft, diffusers, trl, lm-eval and sentence-transformers under the stand-in, on models that are offloaded."""

from __future__ import annotations

import importlib.util

import pytest

from .answers import preloaded_answers

pytestmark = pytest.mark.slow  # a server of preloaded programs imports these libraries


@pytest.mark.long
def test_peft_adapters_of_an_offloaded_model() -> None:
    pytest.importorskip("peft")
    found = preloaded_answers("adapters", modules=("peft", "transformers.models.llama.modeling_llama"))
    assert found == dict.fromkeys(found, True)
    assert len(found) == 13


def test_offloading_of_diffusers_pipelines() -> None:
    pytest.importorskip("diffusers")
    found = preloaded_answers("pipelines", modules=("diffusers",))
    assert found["whole models"] == [True, True]
    assert found["execution device"] == "virtual:0"
    on_host = {"transformer": ["cpu"], "vae": ["cpu"]}
    assert found["after the pipeline"] == on_host
    assert found["block by block"] == [True, True]
    assert found["weights are real"]
    assert found["changed back"]
    assert found["without hooks"]
    on_both = {"transformer": ["virtual:0"], "vae": ["virtual:1"]}
    assert found["balanced"] == [{"transformer": 0, "vae": 1}, on_both, True, True]
    assert found["reset"] == on_host
    assert found["balanced, then block by block"]
    streamed = {"transformer": ["cpu"], "vae": ["virtual:0"]}
    assert found["balanced over one device and the host"] == [{"transformer": "cpu", "vae": 0}, streamed, True, True]
    assert found["balanced, then whole models"]


def test_trainers_of_trl() -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    found = preloaded_answers("trl_trainers", modules=("transformers.trainer",))
    copied = found.pop("a copy as reference")
    assert copied == found["preferences"][1]
    assert found.keys() == {f"{each}{kind}" for each in ("texts", "preferences") for kind in ("", " with adapters")}
    for resident, in_part in found.values():
        assert in_part == resident
        assert len(resident) == 3


def test_scores_of_lm_eval() -> None:
    pytest.importorskip("lm_eval")
    found = preloaded_answers("lm_eval_scores", modules=("transformers.models.llama.modeling_llama",))
    assert found["ram"] == found["disk"] == found["accelerator"]
    assert found["loaded on one"] == ["virtual:0", found["accelerator"]]
    assert "inputs have to be on virtual:0" in found["reported"]
    assert found["loaded on both"] == [[0, 1], found["accelerator"]]
    scores, (rolling,), (text,) = found["accelerator"]
    assert len({tuple(score) for score in scores}) == 3
    assert rolling < 0
    assert len(text.split()) == 5


def test_vectors_of_sentence_transformers() -> None:
    """Those of accelerate, where it is installed, from models on the host and on disk, and from trained ones."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("datasets")
    modules = ("transformers.trainer", "transformers.models.bert.modeling_bert")
    found = preloaded_answers("sentence_vectors", modules=modules)
    resident, *offloaded = found.pop("offloaded")
    assert offloaded == [resident] * 3
    assert found["encoded from disk"] == found["encoded"]
    assert found["fitted"] != found["encoded"] != found["trained"]
    assert len(found["losses"]) == 4
    if importlib.util.find_spec("accelerate") is not None:
        assert preloaded_answers("sentence_vectors", prelude="", modules=modules) == found
