from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file

from bigmodel.checkpoint import mapped_region
from bigmodel.checkpoint.write import Outgoing, offload, write_safetensors
from bigmodel.errors import CheckpointError, DispatchError
from bigmodel.limits import FILE_ALIGNMENT
from bigmodel.sources.headers import read_header
from tests.checkpoint.helpers import DTYPES, assert_same, maps_of, random_tensor, state_dicts


@pytest.mark.slow
@given(state_dicts())
def test_the_reference_reader_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path_factory.mktemp("any") / "t.safetensors"
    offsets = write_safetensors(path, [Outgoing.of(name, t) for name, t in tensors.items()], {"format": "pt"})
    assert_same(load_file(path), tensors)
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert {name: entry.offset for name, entry in header.items()} == offsets
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in header.values())
    assert header.data_start % FILE_ALIGNMENT == 0


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"turned": whole.t(), "rows": whole[1:], "columns": whole[:, ::2], "parameter": torch.nn.Parameter(whole)}
    write_safetensors(tmp_path / "t.safetensors", [Outgoing.of(name, t) for name, t in tensors.items()])
    assert_same(load_file(tmp_path / "t.safetensors"), {name: t.detach() for name, t in tensors.items()})


def test_conjugate_and_negative_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    shown = torch.tensor([1 + 2j, 3 - 4j]).conj()
    write_safetensors(tmp_path / "views.safetensors", [Outgoing.of("a", shown), Outgoing.of("b", shown.imag)])
    found = load_file(tmp_path / "views.safetensors")
    assert found["a"].tolist() == [1 - 2j, 3 + 4j]
    assert found["b"].tolist() == [-2, 4]


def test_four_bit_floats_are_written_as_the_reference_writer_does(tmp_path: Path) -> None:
    packed = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
    write_safetensors(tmp_path / "t.safetensors", [Outgoing.of("w", packed)])
    entry = read_header(tmp_path / "t.safetensors")["w"]
    assert (entry.dtype, entry.shape, entry.nbytes) == (torch.float4_e2m1fn_x2, (2, 4), 8)
    assert b'"dtype":"F4","shape":[2,8]' in (tmp_path / "t.safetensors").read_bytes()


def test_tensors_are_asked_for_one_at_a_time(tmp_path: Path) -> None:
    alive: list[int] = []

    class Watched:
        def __init__(self, number: int) -> None:
            self.number = number

        def __call__(self) -> torch.Tensor:
            alive.append(self.number)
            return torch.full((3,), float(self.number))

    done: list[int] = []
    outgoing = [Outgoing(str(i), torch.float32, (3,), Watched(i)) for i in range(4)]
    write_safetensors(tmp_path / "t.safetensors", outgoing, advance=done.append)
    assert alive == [0, 1, 2, 3]
    assert done == [12] * 4
    assert_same(load_file(tmp_path / "t.safetensors"), {str(i): torch.full((3,), float(i)) for i in range(4)})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_an_accelerator_are_brought_to_the_host(
    tmp_path: Path, accelerators: None, dtype: torch.dtype
) -> None:
    tensor = random_tensor(dtype, (3, 2), seed=3)
    write_safetensors(tmp_path / "t.safetensors", [Outgoing.of("w", tensor.to("virtual:1"))])
    assert_same(load_file(tmp_path / "t.safetensors"), {"w": tensor})


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write_safetensors(tmp_path / "t.safetensors", [])
    assert (tmp_path / "t.safetensors").read_text() == "mine"


@pytest.mark.parametrize(
    ("tensor", "name", "message"),
    [
        (torch.zeros(2, dtype=torch.complex128), "w", "w has the dtype torch.complex128"),
        (torch.zeros(2, device="meta"), "w", "w has no value"),
        (torch.zeros(2), "__metadata__", "safetensors reserves"),
    ],
)
def test_tensors_that_cannot_be_written_are_named(
    tmp_path: Path, tensor: torch.Tensor, name: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_safetensors(tmp_path / "t.safetensors", [Outgoing.of(name, tensor)])


def test_offloaded_tensors_are_mapped_and_their_file_has_no_name(tmp_path: Path) -> None:
    tensors = {str(dtype): random_tensor(dtype, (3, 4), seed=1) for dtype in DTYPES}
    folder = tmp_path / "new" / "folder"
    views = offload(folder, [Outgoing.of(name, tensor) for name, tensor in tensors.items()])
    assert_same(views, tensors)
    assert list(folder.iterdir()) == []
    for view in views.values():
        region = mapped_region(view)
        assert region is not None
        assert region.open() is None
    assert maps_of(folder) == 1
    del view, views
    assert maps_of(folder) == 0


def test_a_full_disk_is_an_error_that_names_the_file_or_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_safetensors(tmp_path / "t.safetensors", [Outgoing.of("w", torch.ones(3))])
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "t.safetensors"))
    with pytest.raises(DispatchError, match=r"offloaded: 12 B of offloaded weights .*No space left on device"):
        offload(tmp_path / "offloaded", [Outgoing.of("w", torch.ones(3))])
    assert not list((tmp_path / "offloaded").iterdir())


def test_two_models_in_one_folder_never_meet(tmp_path: Path) -> None:
    first = offload(tmp_path, [Outgoing.of("w", torch.zeros(4))])
    second = offload(tmp_path, [Outgoing.of("w", torch.ones(4))])
    assert first["w"].sum() == 0
    assert second["w"].sum() == 4


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        offload(tmp_path, [Outgoing("w", torch.float32, (4,), fail)])
    assert list(tmp_path.iterdir()) == []
