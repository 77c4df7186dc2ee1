"""Every way in which a checkpoint does not fit a model is an error that says so, before anything is touched."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.checkpoint import Checkpoint, TensorSource, load_checkpoint_in_model
from bigmodel.checkpoint.match import tie_as_declared, untie_what_differs
from bigmodel.checkpoint.model_tensors import find_model_tensors
from bigmodel.devices.empty import init_empty_weights
from bigmodel.errors import CheckpointMismatchError, DeviceMapError
from bigmodel.profile.model.stage import PassedLayer
from tests.checkpoint.helpers import Tied, on_meta, saved_tensors, snapshot
from tests.checkpoint.transformers_models import MODELS

FULL = saved_tensors(Tied())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refused(model: nn.Module, path: Path, tensors: dict[str, torch.Tensor], message: str, **options: object) -> None:
    """Loading `tensors` is refused with `message`, and the model is as it was."""
    save_file(tensors, path)
    before = snapshot(model)
    with pytest.raises(CheckpointMismatchError, match=f"^{re.escape(str(path))} does not fit .*{message}"):
        load_checkpoint_in_model(model, path, **options)  # type: ignore[arg-type]
    assert snapshot(model) == before


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}], ids=["no_map", "cpu", "disk"])
@pytest.mark.parametrize("lost", ["scale", "layers.1.bias", "embed.weight", "norm.running_var"])
def test_a_missing_key_is_an_error_for_what_is_on_meta(path: Path, lost: str, device_map: object) -> None:
    tensors = {name: tensor for name, tensor in FULL.items() if name != lost}
    message = re.escape(f"{lost} is not in the checkpoint and has no value in the model")
    refused(on_meta(Tied()), path, tensors, message, device_map=device_map)


def test_a_missing_key_is_an_error_for_what_is_real_only_if_strict(path: Path) -> None:
    tensors = {name: tensor for name, tensor in FULL.items() if name != "scale"}
    refused(Tied(), path, tensors, "scale is not in the checkpoint", strict=True)
    model = Tied()
    load_checkpoint_in_model(model, path)
    assert torch.equal(model.scale, torch.full((4,), 2.0))


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_tensor_is_satisfied_by_either_of_its_names(path: Path, name: str) -> None:
    tensors = {key: tensor for key, tensor in FULL.items() if key != "embed.weight"}
    save_file(tensors | {name: FULL["embed.weight"]}, path)
    model = on_meta(Tied())
    load_checkpoint_in_model(model, path, strict=True)
    assert model.embed.weight is model.head.weight
    assert torch.equal(model.embed.weight, FULL["embed.weight"])


def test_unexpected_keys_are_a_warning_or_if_strict_an_error(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = FULL | {"stray": torch.zeros(1), "layers.7.weight": torch.zeros(1)}
    refused(on_meta(Tied()), path, tensors, r"layers\.7\.weight is not in the model; stray is not", strict=True)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(on_meta(Tied()), path)
    (record,) = caplog.records
    assert re.search(r"2 tensors of .* were not used when loading Tied: .*stray", record.getMessage())


def test_tensors_of_other_stages_are_no_unexpected_ones(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = on_meta(Tied())
    model.layers.append(PassedLayer(len(model.layers)))
    passed = f"layers.{len(model.layers) - 1}.weight"
    save_file(FULL | {passed: torch.zeros(1)}, path)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(model, path)
    assert not caplog.records


def test_a_buffer_that_is_never_saved_is_unexpected_in_a_checkpoint(path: Path) -> None:
    refused(on_meta(Tied()), path, FULL | {"position": torch.arange(4)}, "position is not in the model", strict=True)


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_wrong_shape_is_an_error(path: Path, device: str) -> None:
    message = r"scale has shape \(5,\) in the checkpoint and \(4,\) in the model"
    refused(on_meta(Tied()), path, FULL | {"scale": torch.zeros(5)}, message, device_map={"": device})
    message = r"scale has shape \(1, 4\) in the checkpoint"
    refused(on_meta(Tied()), path, FULL | {"scale": torch.zeros(1, 4)}, message, device_map={"": device})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("scale", torch.int32),
        ("scale", torch.bool),
        ("scale", torch.complex64),
        ("norm.num_batches_tracked", torch.float32),
        ("norm.num_batches_tracked", torch.bool),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_wrong_kind_of_dtype_is_an_error(path: Path, name: str, dtype: torch.dtype, device: str) -> None:
    tensors = FULL | {name: torch.zeros(FULL[name].shape, dtype=dtype)}
    message = rf"{re.escape(name)} is {dtype} in the checkpoint and {FULL[name].dtype} in the model"
    refused(on_meta(Tied()), path, tensors, message, device_map={"": device})


def test_integers_may_only_become_wider(path: Path) -> None:
    narrow = FULL | {"norm.num_batches_tracked": torch.tensor(3, dtype=torch.int16)}
    save_file(narrow, path)
    model = on_meta(Tied())
    load_checkpoint_in_model(model, path)
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert model.norm.num_batches_tracked == 3
    wide = FULL | {"norm.num_batches_tracked": torch.tensor(3, dtype=torch.uint64)}
    refused(on_meta(Tied()), path, wide, "num_batches_tracked is torch.uint64")


def test_quantized_weights_are_not_mistaken_for_plain_ones(path: Path) -> None:
    quantized = FULL | {
        "layers.0.weight": FULL["layers.0.weight"].to(torch.float8_e4m3fn),
        "layers.0.weight_scale_inv": torch.ones(1),
    }
    message = r"layers\.0\.weight is quantized: torch\.float8_e4m3fn, with a scale layers\.0\.weight_scale_inv"
    refused(on_meta(Tied()), path, quantized, message)
    del quantized["layers.0.weight_scale_inv"]
    save_file(quantized, path)
    model = on_meta(Tied())
    load_checkpoint_in_model(model, path)
    assert torch.equal(model.layers[0].weight, quantized["layers.0.weight"].float())


def test_a_buffer_left_on_meta_is_an_error_that_says_how_to_build_the_model(path: Path) -> None:
    model = on_meta(Tied())
    model.position = model.position.to("meta")
    refused(model, path, FULL, r"the buffer position is on meta .*init_empty_weights")


def test_tied_names_with_different_values_are_an_error(path: Path) -> None:
    save_file(FULL | {"head.weight": FULL["embed.weight"] + 1}, path)
    model = on_meta(Tied())
    before = snapshot(model)
    with pytest.raises(CheckpointMismatchError, match=r"embed\.weight and head\.weight are one parameter"):
        load_checkpoint_in_model(model, path)
    assert snapshot(model) == before
    save_file(FULL | {"head.weight": FULL["embed.weight"].clone()}, path)
    load_checkpoint_in_model(model, path, strict=True)
    assert model.embed.weight is model.head.weight


def test_many_problems_are_summed_up(path: Path) -> None:
    refused(on_meta(Tied()), path, {"scale": FULL["scale"]}, "and 5 more. Nothing was loaded")


def test_a_map_that_leaves_something_out_is_an_error(path: Path) -> None:
    save_file(FULL, path)
    model = on_meta(Tied())
    before = snapshot(model)
    with pytest.raises(DeviceMapError, match="no device for scale and 5 more"):
        load_checkpoint_in_model(model, path, {"layers": "cpu", "embed": "disk", "head": "disk"})
    assert snapshot(model) == before


def names(targets: list) -> list[list[str]]:
    return [target.names for target in targets if len(target.names) > 1]


def test_weights_a_transformers_model_declares_tied_are_one_slot_on_meta() -> None:
    with init_empty_weights():
        model = MODELS["t5"]()
    for module in (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head):
        module.weight = nn.Parameter(torch.empty_like(module.weight))
    assert names(find_model_tensors(model)) == []
    (tied,) = names(tie_as_declared(model, find_model_tensors(model)))
    assert set(tied) == {
        "shared.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
    }


def test_real_weights_that_were_untied_stay_untied() -> None:
    model = MODELS["llama_tied"]()
    model.lm_head.weight = nn.Parameter(torch.ones_like(model.lm_head.weight))
    assert names(tie_as_declared(model, find_model_tensors(model))) == []


def test_a_module_that_declares_nothing_is_left_alone() -> None:
    targets = find_model_tensors(Tied())
    assert tie_as_declared(Tied(), targets) is targets


def sources(checkpoint: Checkpoint) -> dict[str, TensorSource]:
    return {
        name: TensorSource((name,), checkpoint.entry(name).dtype, checkpoint.entry(name).shape) for name in checkpoint
    }


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_equal_values_under_both_names_stay_tied(tmp_path: Path, value: float) -> None:
    both = {name: torch.full((8, 4), value) for name in ("embed.weight", "head.weight")}
    save_file(both, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    model = Tied()
    targets = untie_what_differs(model, find_model_tensors(model), sources(checkpoint), checkpoint)
    assert names(targets) == [["embed.weight", "head.weight"]]


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
        untie_what_differs(model, find_model_tensors(model), sources(checkpoint), checkpoint)


def test_one_storage_under_two_names_of_a_legacy_file_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    checkpoint = Checkpoint.open(tmp_path)
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("the weights were read"))
    targets = untie_what_differs(model, find_model_tensors(model), sources(checkpoint), checkpoint)
    assert names(targets) == [["embed.weight", "head.weight"]]
