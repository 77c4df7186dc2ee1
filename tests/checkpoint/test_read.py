"""Fused tensors, wherever they go: the oracle is what transformers' operations make."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, conversion_mapping
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

from bigmodel.checkpoint import load_checkpoint_in_model, mapped_region
from bigmodel.checkpoint import read as ahead
from bigmodel.checkpoint.mapping import MappedFile
from bigmodel.checkpoint.progress import watching
from bigmodel.checkpoint.read import populated
from bigmodel.devices import virtual
from bigmodel.devices.empty import init_empty_weights
from bigmodel.errors import CheckpointError, DeviceMapError
from bigmodel.sources.conversion import Fusion
from tests.checkpoint.helpers import assert_same, readers, same_bits, snapshot
from tests.checkpoint.test_pages import resident_pages
from tests.checkpoint.transformers_models import MODELS, model_class, saved


def empty(name: str) -> PreTrainedModel:
    with init_empty_weights():
        return MODELS[name]()


@pytest.mark.slow
@pytest.mark.parametrize("in_pieces", [True, False], ids=["in_pieces", "by_operations"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as_it_is", "cast"])
@pytest.mark.parametrize("device", ["cpu", "virtual:1"])
def test_experts_are_fused_where_they_go(
    tmp_path: Path,
    accelerators: None,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype | None,
    in_pieces: bool,
) -> None:
    if not in_pieces:
        monkeypatch.setattr(Fusion, "parts", lambda _: None)
    folder = saved("mixtral", tmp_path)
    expected = model_class("mixtral").from_pretrained(folder, dtype=dtype or torch.float32)
    model = empty("mixtral")
    load_checkpoint_in_model(model, folder, {"": device}, dtype=dtype)
    assert_same(model.state_dict(), expected.state_dict())
    assert {str(parameter.device) for parameter in model.parameters()} == {device}


@pytest.mark.parametrize("in_pieces", [True, False], ids=["in_pieces", "by_operations"])
def test_on_disk_fused_experts_keep_the_dtype_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_pieces: bool
) -> None:
    if not in_pieces:
        monkeypatch.setattr(Fusion, "parts", lambda _: None)
    folder = saved("qwen3_moe", tmp_path / "saved")
    model = empty("qwen3_moe")
    load_checkpoint_in_model(model, folder, {"": "disk"}, tmp_path / "offload", dtype="bfloat16")
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert mapped_region(parameter) is not None


def test_fused_experts_on_disk_need_a_folder(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    model = empty("mixtral")
    before = snapshot(model)
    with pytest.raises(
        DeviceMapError, match=r"experts.* cannot be used in place on disk, for it is fused .*nor can 3 others"
    ):
        load_checkpoint_in_model(model, folder, {"": "disk"})
    assert snapshot(model) == before
    load_checkpoint_in_model(model, folder, {"": "disk"} | {f"model.layers.{i}.mlp.experts": "cpu" for i in range(2)})
    assert mapped_region(model.lm_head.weight) is not None


def test_no_more_than_the_fused_tensor_is_on_the_accelerator(tmp_path: Path, accelerators: None) -> None:
    folder = saved("mixtral", tmp_path)
    model = empty("mixtral")
    held = sum(p.numel() for p in model.parameters()) * 2 + sum(b.nbytes for b in model.buffers())
    virtual.configure(0, capacity=held)
    load_checkpoint_in_model(model, folder, {"": 0}, dtype=torch.bfloat16)
    assert {str(parameter.device) for parameter in model.parameters()} == {"virtual:0"}


def split_mapping(*_: object, **__: object) -> list[WeightConverter]:
    """A model's way to say that one tensor of the checkpoint becomes two, as for a fused query-key-value."""
    two = ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    return [
        WeightConverter("self_attn.kv_proj.weight", two, [Chunk(0)]),
        WeightConverter("mlp.turned_proj.weight", "mlp.up_proj.weight", [Transpose(0, 1)]),
    ]


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cpu"},
        {"": "cpu", "model.layers.0.self_attn.k_proj": "disk"},
        {"": "cpu", "model.layers.0.self_attn.v_proj": "virtual:1", "model.layers.0.mlp": "disk"},
        {"": "disk"},
    ],
)
def test_one_tensor_that_becomes_two_may_go_to_two_devices(
    tmp_path: Path, accelerators: None, monkeypatch: pytest.MonkeyPatch, device_map: dict[str, str]
) -> None:
    torch.manual_seed(0)
    expected = MODELS["llama"]().state_dict()
    joined = dict(expected)
    for layer in ("model.layers.0.", "model.layers.1."):
        keys, values = (joined.pop(f"{layer}self_attn.{part}_proj.weight") for part in "kv")
        joined[f"{layer}self_attn.kv_proj.weight"] = torch.cat([keys, values])
        joined[f"{layer}mlp.turned_proj.weight"] = joined.pop(f"{layer}mlp.up_proj.weight").t().contiguous()
    save_file(joined, tmp_path / "model.safetensors")
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", split_mapping)

    model = empty("llama")
    load_checkpoint_in_model(model, tmp_path, device_map, tmp_path / "offload", strict=True)

    assert_same(model.state_dict(), expected)
    for name, parameter in model.named_parameters():
        deciding = max((p for p in device_map if f"{name}.".startswith(f"{p}." if p else "")), key=len)
        assert (mapped_region(parameter) is not None) == (device_map[deciding] == "disk")
        assert str(parameter.device) == device_map[deciding].replace("disk", "cpu")
    assert same_bits(model.lm_head.weight, expected["lm_head.weight"])


def test_deferred_reads_lie_in_the_file_unless_cast_or_fused(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    expected = model_class("mixtral").from_pretrained(folder, dtype=torch.float32)
    model = empty("mixtral")
    load_checkpoint_in_model(model, folder, {"": "cpu"}, read_later=True)
    assert_same(model.state_dict(), expected.state_dict())
    in_file = {name: mapped_region(parameter) is not None for name, parameter in model.named_parameters()}
    assert in_file == {name: "experts" not in name for name in in_file}
    cast = empty("mixtral")
    load_checkpoint_in_model(cast, folder, {"": "cpu"}, dtype="bfloat16", read_later=True)
    assert all(mapped_region(parameter) is None for parameter in cast.parameters())


SIZE = 64 * 1024


@pytest.fixture
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Twenty tensors in a file, four to a batch, three batches ahead at most."""
    monkeypatch.setattr(ahead, "_BATCH_BYTES", 4 * SIZE)
    monkeypatch.setattr(ahead, "_BYTES_AHEAD", 12 * SIZE)
    path = tmp_path / "t.bin"
    path.write_bytes(b"\1" * (20 * SIZE))
    file = MappedFile(path)
    return [file.tensor(torch.uint8, (SIZE,), i * SIZE) for i in range(20)]


def test_items_come_in_order_each_with_its_pages_in_memory(tensors: list[torch.Tensor]) -> None:
    seen = []
    for i in populated(range(20), lambda i: [tensors[i]]):
        assert resident_pages(tensors[i]) == SIZE // 4096
        seen.append(i)
    assert seen == list(range(20))


def test_reading_runs_only_so_far_ahead(tensors: list[torch.Tensor]) -> None:
    asked: list[int] = []

    def views(i: int) -> list[torch.Tensor]:
        asked.append(i)
        return [tensors[i]]

    items = populated(range(20), views)
    assert next(items) == 0
    assert len(asked) <= 16
    items.close()  # type: ignore[attr-defined]
    assert len(asked) <= 16


def test_an_item_may_have_several_tensors_or_none(tensors: list[torch.Tensor]) -> None:
    views = {"a": tensors[:7], "b": [], "c": [torch.empty(0)], "d": tensors[7:]}
    assert list(populated(views, views.__getitem__)) == list(views)


def test_many_small_items_share_a_batch(tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(ahead, "populate", lambda shown: calls.append(len(shown)))
    small = [tensor[:8] for tensor in tensors]
    assert list(populated(range(20), lambda i: [small[i]])) == list(range(20))
    assert calls == [20]


def test_a_failed_read_is_raised_and_the_threads_end(
    tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise CheckpointError("the disk failed")

    monkeypatch.setattr(ahead, "populate", fail)
    before = readers()
    with pytest.raises(CheckpointError, match="the disk failed"):
        list(populated(range(20), lambda i: [tensors[i]]))
    assert readers() <= before


def test_nothing_is_nothing() -> None:
    assert list(populated([], lambda _: [])) == []


def test_the_next_tensor_is_copied_while_the_pages_of_the_last_one_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    copied, in_time = Event(), list[bool]()
    monkeypatch.setattr(ahead, "release", lambda _: in_time.append(copied.wait(60)))

    def report(done: int, total: int) -> None:
        if done == total:
            copied.set()

    with watching(report):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, dtype="bfloat16")
    assert in_time == [True, True]
    assert_same(model.state_dict(), expected)
