"""A quantised model on every placement: the dequantised model's bits, within its plan."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.devices.empty import init_empty_weights
from bigmodel.dispatch import from_pretrained, get_plan, load_checkpoint_and_dispatch, undispatch
from bigmodel.plan import make_plan

from ..accelerators import at, exact
from ..examples import alike, some
from .checkpoints import TOKENS, deepseek_v3, gpt_oss, llama, mixtral, published, qwen3_moe
from .twins import LINEAR, Twin, bnb4, fp8, mxfp4, packed

(NESTED,) = [twin for twin in LINEAR if twin.name == "nf4-nested"]
FURTHER = [twin for twin in LINEAR if twin is not NESTED]
FURTHER_MIXTURES = [(mxfp4(), gpt_oss), (packed(), qwen3_moe), (bnb4(), qwen3_moe), (fp8(), deepseek_v3)]
MIXTURES = [(fp8(), mixtral), (fp8(), deepseek_v3), (packed(), qwen3_moe), (mxfp4(), gpt_oss)]
LAYERS = [f"model.layers.{n}" for n in range(2)]
ENDS: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), 0)
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {"": 0},
    "streamed from RAM": {**ENDS, **dict.fromkeys(LAYERS, "cpu")},
    "streamed from disk": {**ENDS, **dict.fromkeys(LAYERS, "disk")},
    "on disk, computed on the host": {"": "disk"},
    "over two accelerators": {**ENDS, LAYERS[0]: 1, LAYERS[1]: "cpu"},
}
RESTORED = "streamed from disk"
"""The placement of every run, and of all formats: they are restored in a slot. What else differs, no format sees; on
the host, the tests of `replace` compute with all of them."""


def _name(each: Any) -> str:
    return getattr(each, "name", None) or getattr(each, "__name__", None) or str(each)


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
@pytest.mark.parametrize(
    ("twin", "placement"),
    [
        (NESTED, RESTORED),
        *(pytest.param(NESTED, each, marks=pytest.mark.long) for each in PLACEMENTS if each != RESTORED),
        *(pytest.param(twin, RESTORED, marks=pytest.mark.long) for twin in FURTHER[:6]),
        *((twin, RESTORED) for twin in some(FURTHER[6:], first=0)),
    ],
    ids=_name,
)
def test_every_placement_gives_the_same_bits(twin: Twin, placement: str, tmp_path: Path) -> None:
    _same_bits(twin, llama, placement, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
@pytest.mark.parametrize(
    ("twin", "make", "placement"),
    [
        pytest.param(fp8(), mixtral, RESTORED, marks=pytest.mark.long),
        *((fp8(), mixtral, placement) for placement in some([*PLACEMENTS], first=0) if placement != RESTORED),
        *((twin, make, RESTORED) for twin, make in some(FURTHER_MIXTURES, first=1)),
    ],
    ids=_name,
)
def test_every_placement_of_a_mixture_gives_the_same_bits(
    twin: Twin, make: Callable[..., Any], placement: str, tmp_path: Path
) -> None:
    _same_bits(twin, make, placement, tmp_path)


def _same_bits(twin: Twin, make: Callable[..., Any], placement: str, folder: Path) -> None:
    whole = published(folder / "q", twin, make)
    on_host = placement == "on disk, computed on the host"
    if placement == "over two accelerators" and at(0).startswith("cuda") and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model = from_pretrained(folder / "q", device_map=PLACEMENTS[placement], context_length=16, batch_size=2)
    if not on_host:
        whole = whole.to(at(0))
    before = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = whole(TOKENS.to(whole.device)).logits.cpu()
        for _ in range(2):
            assert torch.equal(model(TOKENS.to(whole.device)).logits.cpu(), expected)
    undispatch(model, "cpu")
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor.contiguous().view(-1).view(torch.uint8), before[name].view(-1).view(torch.uint8))


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@alike("dtype", [None, torch.bfloat16], first=1)
def test_a_model_on_meta_is_loaded_and_dispatched_with_stored_weights(
    dtype: torch.dtype | None, tmp_path: Path
) -> None:
    whole = published(tmp_path / "q", packed()).to(at(0))
    whole = whole.float() if dtype is None else whole
    with init_empty_weights():
        model = type(whole)(whole.config).to(torch.float32)
    device_map = PLACEMENTS["streamed from disk"]
    load_checkpoint_and_dispatch(model, tmp_path / "q", device_map, offload_folder=tmp_path, dtype=dtype)
    saved = load_file(tmp_path / "q" / "model.safetensors")
    assert model.state_dict().keys() == saved.keys()
    with torch.no_grad():
        assert torch.equal(model(TOKENS.to(at(0))).logits, whole(TOKENS.to(at(0))).logits)


@pytest.mark.slow
@alike("twin", LINEAR, first=9, ids=_name)
def test_planned_weights_are_the_stored_bytes(twin: Twin, tmp_path: Path) -> None:
    published(tmp_path / "q", twin)
    found = make_plan(tmp_path / "q", max_memory={"cpu": "1GB"}, context_length=0)
    assert any("stored as" in note and twin.label in note for note in found.notes)
    assert found.devices["cpu"].weights == _stored_bytes(tmp_path / "q")


def _stored_bytes(folder: Path) -> int:
    stored = load_file(folder / "model.safetensors").items()
    return sum(tensor.nbytes for name, tensor in stored if not name.endswith("e_score_correction_bias"))  # a buffer


@pytest.mark.usefixtures("accelerators")
@exact
@pytest.mark.slow
@pytest.mark.parametrize(
    ("twin", "make", "share"),
    [
        (NESTED, llama, 3.0),
        *(pytest.param(*each, 0.6, marks=pytest.mark.long) for each in [(NESTED, llama), MIXTURES[-1]]),
        *((twin, make, 0.6) for twin, make in some([*reversed(MIXTURES[:-1]), (fp8(), llama)], first=0)),
    ],
    ids=_name,
)
def test_a_plan_counts_stored_and_restored_bytes(
    twin: Twin, make: Callable[..., Any], share: float, tmp_path: Path
) -> None:
    published(tmp_path / "q", twin, make, vocab_size=256)
    nbytes = _stored_bytes(tmp_path / "q")
    prompt = torch.arange(32).view(1, 32)
    model = from_pretrained(
        tmp_path / "q",
        device_map="sequential",
        max_memory={0: int(nbytes * share) + 400_000, "cpu": 10**9},
        context_length=33,
    )
    plan = get_plan(model)
    assert plan is not None
    assert not plan.guarded
    assert any("stored as" in note and twin.label in note for note in plan.notes)
    assert sum(device.weights for device in plan.devices.values()) == nbytes
    gc.collect()
    reset_peak_memory(0)
    with torch.no_grad():
        model.generate(prompt.to(at(0)), max_new_tokens=1, do_sample=False)
    peak, planned = max_memory_allocated(0), plan.devices[0].total
    # A mixture's plan holds for any routing: this one uses fewer experts at once.
    assert (0.9 if make is llama else 0.8) * planned <= peak <= planned <= int(nbytes * share) + 400_000
