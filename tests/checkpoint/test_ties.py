from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.checkpoint import Checkpoint, Source
from bigmodel.checkpoint.slots import find_slots
from bigmodel.checkpoint.ties import tie_as_declared, untie_what_differs
from bigmodel.devices.empty import init_empty_weights
from bigmodel.errors import CheckpointMismatchError
from tests.checkpoint.helpers import Tied
from tests.checkpoint.transformers_models import MODELS


def names(slots: list) -> list[list[str]]:
    return [slot.names for slot in slots if len(slot.names) > 1]


def test_what_a_transformers_model_declares_tied_is_one_slot_on_meta() -> None:
    with init_empty_weights():
        model = MODELS["t5"]()
    for module in (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head):
        module.weight = nn.Parameter(torch.empty_like(module.weight))
    assert names(find_slots(model)) == []
    (tied,) = names(tie_as_declared(model, find_slots(model)))
    assert set(tied) == {
        "shared.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
    }


def test_what_is_real_and_was_untied_stays_untied() -> None:
    model = MODELS["llama_tied"]()
    model.lm_head.weight = nn.Parameter(torch.ones_like(model.lm_head.weight))
    assert names(tie_as_declared(model, find_slots(model))) == []


def test_a_module_that_declares_nothing_is_left_alone() -> None:
    slots = find_slots(Tied())
    assert tie_as_declared(Tied(), slots) is slots


def sources(checkpoint: Checkpoint) -> dict[str, Source]:
    return {name: Source((name,), checkpoint.entry(name).dtype, checkpoint.entry(name).shape) for name in checkpoint}


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_equal_values_under_both_names_stay_tied(tmp_path: Path, value: float) -> None:
    both = {name: torch.full((8, 4), value) for name in ("embed.weight", "head.weight")}
    save_file(both, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    model = Tied()
    slots = untie_what_differs(model, find_slots(model), sources(checkpoint), checkpoint)
    assert names(slots) == [["embed.weight", "head.weight"]]


@pytest.mark.parametrize(
    "other",
    [torch.zeros(8, 4), torch.ones(8, 4, dtype=torch.float16), torch.ones(4, 8)],
    ids=["value", "dtype", "shape"],
)
def test_different_values_under_the_names_of_one_parameter_are_an_error(tmp_path: Path, other: torch.Tensor) -> None:
    save_file({"embed.weight": torch.ones(8, 4), "head.weight": other}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    model = Tied()
    with pytest.raises(CheckpointMismatchError, match=r"embed\.weight and head\.weight are one parameter"):
        untie_what_differs(model, find_slots(model), sources(checkpoint), checkpoint)


def test_one_storage_under_two_names_of_a_legacy_file_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    checkpoint = Checkpoint.open(tmp_path)
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("the weights were read"))
    slots = untie_what_differs(model, find_slots(model), sources(checkpoint), checkpoint)
    assert names(slots) == [["embed.weight", "head.weight"]]
