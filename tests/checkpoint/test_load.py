from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from bigmodel.checkpoint import Checkpoint, load_checkpoint_in_model, mapped_region, run_dtype
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, virtual
from bigmodel.errors import CheckpointError, DeviceMapError, PlanError
from tests.checkpoint.helpers import (
    Holder,
    Tied,
    assert_same,
    descriptors_of,
    holder_names,
    maps_of,
    on_meta,
    readers,
    same_bits,
    save_sharded,
    saved_tensors,
    snapshot,
    state_dicts,
)
from tests.checkpoint.hostile import HOSTILE_FOLDERS, HostileFolder

FULL = saved_tensors(Tied())
DEVICES = ["cpu", "disk", "virtual:0", "virtual:1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_sharded(tmp_path / "checkpoint", FULL, shards=3)


@pytest.mark.slow
@given(st.data(), state_dicts(), st.integers(1, 3))
def test_whatever_is_loaded_wherever_it_is_what_the_reference_reader_reads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, tensors: dict[str, torch.Tensor], shards: int
) -> None:
    virtual.enable(count=2)
    names = holder_names(tensors)
    folder = save_sharded(tmp_path_factory.mktemp("any"), names, shards)
    expected = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    prefixes = {
        name[:end] for name in names for end in range(len(name) + 1) if end in (0, len(name)) or name[end] == "."
    }
    device_map = {"": data.draw(st.sampled_from(DEVICES))}
    for prefix in sorted(prefixes):
        if data.draw(st.booleans()):
            device_map[prefix] = data.draw(st.sampled_from(DEVICES))
    model = Holder(tensors)

    load_checkpoint_in_model(model, folder, device_map, offload_buffers=data.draw(st.booleans()), strict=True)

    assert_same(model.state_dict(), expected)
    for name, tensor in model.state_dict().items():
        deciding = max((p for p in device_map if f"{name}.".startswith(f"{p}." if p else "")), key=len)
        device = device_map[deciding]
        assert str(tensor.device) == ("cpu" if device == "disk" else device)


def test_a_parameter_on_disk_is_a_view_of_the_file_and_nothing_is_read(folder: Path) -> None:
    model = on_meta(Tied())
    load_checkpoint_in_model(model, folder, {"": "disk"})
    for name, parameter in model.named_parameters():
        region = mapped_region(parameter)
        assert region is not None, name
        raw = region.path.read_bytes()[region.offset : region.offset + region.nbytes]
        assert raw == bytes(FULL[name].reshape(-1).view(torch.uint8).tolist())
        assert isinstance(parameter, nn.Parameter)
    assert_same(model.state_dict(), FULL | {"head.weight": FULL["embed.weight"]})


def test_buffers_come_to_memory_unless_they_shall_stay_on_disk(folder: Path) -> None:
    model = on_meta(Tied())
    load_checkpoint_in_model(model, folder, {"": "disk"})
    assert mapped_region(model.norm.running_mean) is None
    load_checkpoint_in_model(model, folder, {"": "disk"}, offload_buffers=True)
    assert mapped_region(model.norm.running_mean) is not None
    assert mapped_region(model.position) is None


def test_a_parameter_on_the_cpu_is_in_memory_and_no_place_on_disk(folder: Path) -> None:
    model = on_meta(Tied())
    load_checkpoint_in_model(model, folder, {"": "cpu"})
    assert all(mapped_region(tensor) is None for tensor in model.parameters())
    assert_same(model.state_dict(), FULL | {"head.weight": FULL["embed.weight"]})


def test_writing_to_a_loaded_model_never_reaches_the_checkpoint(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    model = on_meta(Tied())
    load_checkpoint_in_model(model, folder, {"": "cpu", "embed": "disk", "head": "disk"})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([[1, 2], [3, 4], [5, 6], [7, 0]]).reshape(-1)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.embed.weight, FULL["embed.weight"])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    fresh = on_meta(Tied())
    load_checkpoint_in_model(fresh, folder)
    assert_same(fresh.state_dict(), FULL | {"head.weight": FULL["embed.weight"]})


@pytest.mark.parametrize("device", DEVICES)
def test_tied_weights_stay_one_parameter(folder: Path, accelerators: None, device: str) -> None:
    model = on_meta(Tied())
    load_checkpoint_in_model(model, folder, {"": device})
    assert model.embed.weight is model.head.weight
    assert same_bits(model.head.weight, FULL["embed.weight"])


def test_parameters_stay_the_objects_they_are(folder: Path, accelerators: None) -> None:
    for device in DEVICES:
        model = on_meta(Tied())
        model.scale.requires_grad_(False)
        model.scale.note = "mine"
        load_checkpoint_in_model(model, folder, {"": device})
        assert not model.scale.requires_grad
        assert model.scale.note == "mine"
        assert model.embed.weight.requires_grad
        assert model.embed.weight.is_leaf


def test_accelerators_hold_what_the_map_gives_them(folder: Path, accelerators: None) -> None:
    model = on_meta(Tied())
    load_checkpoint_in_model(model, folder, {"": 0, "layers": 1, "layers.1.bias": "cpu"})
    devices = {name: str(tensor.device) for name, tensor in model.state_dict().items()}
    assert devices.pop("layers.1.bias") == "cpu"
    assert {device for name, device in devices.items() if name.startswith("layers")} == {"virtual:1"}
    assert {device for name, device in devices.items() if not name.startswith("layers")} == {"virtual:0"}


def test_an_accelerator_never_holds_more_than_what_it_keeps(tmp_path: Path, accelerators: None) -> None:
    tensors = {f"{i}.weight": torch.rand(64, 64, dtype=torch.float32) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    half = 8 * 64 * 64 * 2
    virtual.configure(0, capacity=half)
    model = on_meta(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))))
    load_checkpoint_in_model(model, tmp_path, {"": 0}, dtype=torch.bfloat16)
    assert_same(model.state_dict(), {name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_a_full_accelerator_leaves_the_model_as_it_was(folder: Path, accelerators: None) -> None:
    virtual.configure(0, capacity=200)
    model = on_meta(Tied())
    before = snapshot(model)
    with pytest.raises(torch.OutOfMemoryError):
        load_checkpoint_in_model(model, folder, {"": 0})
    assert snapshot(model) == before
    gc.collect()
    assert (maps_of(folder), descriptors_of(folder)) == (0, 0)


@pytest.mark.parametrize("device", ["cpu", "virtual:0"])
def test_a_dtype_casts_what_is_copied(folder: Path, accelerators: None, device: str) -> None:
    model = on_meta(Tied())
    load_checkpoint_in_model(model, folder, {"": device}, dtype="bfloat16", keep_in_fp32_modules=["layers.1", "norm"])
    for name, tensor in model.state_dict().items():
        kept = name.startswith(("layers.1", "norm"))
        expected = FULL["embed.weight" if name == "head.weight" else name]
        assert same_bits(tensor, expected if kept or not expected.is_floating_point() else expected.bfloat16())


def test_on_disk_the_file_s_dtype_stays_and_the_wanted_one_is_noted(folder: Path) -> None:
    model = on_meta(Tied())
    load_checkpoint_in_model(model, folder, {"": "disk"}, dtype=torch.float16)
    assert model.scale.dtype == torch.float32
    assert run_dtype(model.scale) == torch.float16
    assert model.norm.running_mean.dtype == torch.float16
    assert run_dtype(model.norm.num_batches_tracked) == torch.int64


def test_without_a_dtype_the_model_s_own_counts(folder: Path) -> None:
    model = on_meta(Tied().double())
    load_checkpoint_in_model(model, folder, {"": "cpu", "layers": "disk"})
    assert same_bits(model.scale, FULL["scale"].double())
    assert model.layers[0].weight.dtype == torch.float32
    assert run_dtype(model.layers[0].weight) == torch.float64
    assert run_dtype(model.scale) == torch.float64


def test_without_a_map_real_tensors_are_filled_where_they_are(folder: Path, accelerators: None) -> None:
    model = Tied()
    model.layers.to("virtual:1")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parameters = dict(model.named_parameters())
    load_checkpoint_in_model(model, folder)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert optimizer.param_groups[0]["params"][0] is model.scale
    assert_same(model.state_dict(), FULL | {"head.weight": FULL["embed.weight"]})
    assert str(model.layers[0].weight.device) == "virtual:1"


def test_an_open_checkpoint_can_be_loaded(folder: Path) -> None:
    model = on_meta(Tied())
    load_checkpoint_in_model(model, Checkpoint.open(folder))
    assert same_bits(model.scale, FULL["scale"])


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}], ids=["no_map", "cpu", "disk"])
def test_a_legacy_checkpoint_loads_the_same(tmp_path: Path, device_map: dict[str, str] | None) -> None:
    torch.save(Tied().state_dict() | FULL | {"head.weight": FULL["embed.weight"]}, tmp_path / "pytorch_model.bin")
    model = on_meta(Tied())
    load_checkpoint_in_model(model, tmp_path, device_map, strict=True)
    assert_same(model.state_dict(), FULL | {"head.weight": FULL["embed.weight"]})
    assert all((mapped_region(p) is not None) == (device_map == {"": "disk"}) for p in model.parameters())


def test_maps_and_descriptors_go_with_the_model(folder: Path) -> None:
    model = on_meta(Tied())
    load_checkpoint_in_model(model, folder, {"": "cpu", "layers": "disk"})
    assert maps_of(folder) > 0
    assert descriptors_of(folder) == 0
    kept = model.layers[0].weight
    del model
    assert maps_of(folder) == 1
    assert same_bits(kept, FULL["layers.0.weight"])
    del kept
    assert maps_of(folder) == 0


def test_no_thread_is_left_behind(folder: Path) -> None:
    before = readers()
    load_checkpoint_in_model(on_meta(Tied()), folder, {"": "cpu"})
    assert readers() <= before


@pytest.mark.parametrize("hostile", HOSTILE_FOLDERS, ids=repr)
@pytest.mark.parametrize("make", [Tied, lambda: on_meta(Tied())], ids=["real", "meta"])
def test_a_hostile_checkpoint_leaves_the_model_as_it_was(
    hostile: HostileFolder, make: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "folder"
    path.mkdir()
    hostile.build(path)
    model = make()
    before = snapshot(model)
    with pytest.raises(hostile.error):
        load_checkpoint_in_model(model, path, {"": "cpu"})
    assert snapshot(model) == before
    assert not (tmp_path / "pwned").exists()


def test_a_file_cut_short_while_it_is_read_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    save_file({"weight": torch.rand(512, 512), "bias": torch.rand(512)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.tensor("weight", resident=True)  # mapped while it is whole
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(4096)
    model = on_meta(nn.Linear(512, 512))
    before = snapshot(model)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint_in_model(model, checkpoint, {"": "cpu"})
    assert snapshot(model) == before


def test_bitsandbytes_offload_is_refused_plainly(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="offload_8bit_bnb=True is not supported"):
        load_checkpoint_in_model(Tied(), folder, offload_8bit_bnb=True)


@pytest.mark.parametrize("dtype", ["int4", "float99"])
def test_a_dtype_that_torch_cannot_compute_in_is_refused(folder: Path, dtype: str) -> None:
    with pytest.raises((CheckpointError, PlanError), match=dtype):
        load_checkpoint_in_model(Tied(), folder, dtype=dtype)


def test_tensors_that_cannot_be_mapped_in_place_need_a_folder(tmp_path: Path) -> None:
    torch.save({"weight": torch.arange(6.0).reshape(3, 2).t(), "bias": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    model = on_meta(nn.Linear(3, 2))
    before = snapshot(model)
    with pytest.raises(DeviceMapError, match=r"weight cannot be used in place.*offload_folder=, to which 24 bytes"):
        load_checkpoint_in_model(model, tmp_path, {"": "disk"})
    assert snapshot(model) == before
    load_checkpoint_in_model(model, tmp_path, {"": "disk"}, offload_folder=tmp_path / "offload")
    assert mapped_region(model.weight) is not None
    assert torch.equal(model.weight, torch.arange(6.0).reshape(3, 2).t())
    assert list((tmp_path / "offload").iterdir()) == [], "the file has no name any more"


@pytest.mark.slow
def test_thousands_of_tensors_are_loaded_in_linear_time(tmp_path: Path) -> None:
    """Quadratic work would take minutes; the test's own time limit is the measure."""
    tensors = {f"experts.{i // 100}.{i % 100}.weight": torch.full((2, 2), float(i)) for i in range(4_000)}
    save_sharded(tmp_path, tensors, shards=10)

    def experts() -> nn.Module:
        return nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(100))

    model = nn.Module()
    with torch.device("meta"):
        model.experts = nn.ModuleList(experts() for _ in range(40))
    device_map = {f"experts.{i}": "disk" if i % 2 else "cpu" for i in range(40)}
    load_checkpoint_in_model(model, tmp_path, device_map, strict=True)
    assert all(torch.equal(model.get_parameter(name), tensors[name]) for name in list(tensors)[::97])


@pytest.mark.slow
def test_loading_to_disk_brings_nothing_in(tmp_path: Path) -> None:
    save_file({f"{i}.weight": torch.ones(2048, 2048) for i in range(8)}, tmp_path / "model.safetensors")
    model = on_meta(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))))
    gc.collect()
    reset_peak_memory("cpu")
    before = memory_allocated("cpu")
    load_checkpoint_in_model(model, tmp_path, {"": "disk"})
    assert max_memory_allocated("cpu") - before < 16 * 2**20
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    # What earlier tests have allocated may be freed meanwhile: less than a tensor.
    assert memory_allocated("cpu") - before > 7 * 16 * 2**20, "on the CPU it is all there"


@pytest.mark.slow
def test_loading_to_an_accelerator_keeps_nothing_on_the_host(tmp_path: Path, accelerators: None) -> None:
    save_file({f"{i}.weight": torch.ones(2048, 2048) for i in range(8)}, tmp_path / "model.safetensors")
    model = on_meta(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))))
    checkpoint = Checkpoint.open(tmp_path)
    load_checkpoint_in_model(model, checkpoint, {"": 0})
    file = tmp_path / "model.safetensors"
    smaps = Path("/proc/self/smaps").read_text().partition(str(file))[2]
    resident = next(int(line.split()[1]) for line in smaps.splitlines() if line.startswith("Rss:"))
    assert resident <= 8 * 2 * 2048, "in KiB: at most the large pages at the edges of each tensor"


def test_loading_to_an_accelerator_makes_no_copy_that_holds_the_host(tmp_path: Path, accelerators: None) -> None:
    save_file({"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    model = nn.Linear(4, 3, device="meta")
    before = virtual.host_waits()
    load_checkpoint_in_model(model, tmp_path, {"": "virtual:0"})
    assert virtual.host_waits().since(before).copies_to_device == 0
    assert torch.equal(model.weight.detach().cpu(), torch.arange(12.0).reshape(3, 4))
