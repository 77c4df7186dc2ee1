"""Weights that a file of others does not align, and that the host computes with: same bits, within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from bigmodel import dispatch_model, get_plan, load_checkpoint_and_dispatch, undispatch
from bigmodel.checkpoint import mapped_region
from bigmodel.dispatch.attach.builder import Builder
from bigmodel.limits import VECTOR_BYTES

pytestmark = pytest.mark.usefixtures("every_accelerator")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(67, 129), nn.Linear(129, 65)).eval()


def nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def written(model: nn.Module, folder: Path, shift: int = 36) -> Path:
    """Write a checkpoint whose tensors begin `shift` bytes after a multiple of 64, as the format allows."""
    raw = save({name: tensor.contiguous() for name, tensor in model.state_dict().items()})
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip()
    header += b" " * ((shift - 8 - len(header)) % 64)
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    return path


def loaded(path: Path, device_map: object, **options: object) -> nn.Module:
    return load_checkpoint_and_dispatch(small(), path, device_map=device_map, **options)  # type: ignore[arg-type]


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % VECTOR_BYTES == 0


@pytest.mark.parametrize("shift", [36, 40])
@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_the_host_computes_the_bits_of_the_model_in_memory(tmp_path: Path, device: str, shift: int) -> None:
    original = small()
    model = loaded(written(original, tmp_path, shift), {"": device})
    x = torch.randn(1, 67)
    with torch.no_grad():
        assert torch.equal(model(x), original(x))
    assert all(map(is_aligned, model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), original.parameters(), strict=True))


def test_the_plan_counts_the_copies_of_weights_on_disk(tmp_path: Path) -> None:
    original = small()
    model = loaded(written(original, tmp_path), {"": "disk"})
    assert get_plan(model).devices["cpu"].weights == nbytes(original)
    assert "4 weights on disk" in get_plan(model).notes[-1]
    even = nn.Sequential(nn.Linear(64, 64))
    load_checkpoint_and_dispatch(even, written(even, tmp_path, 0), {"": "disk"})
    assert get_plan(even).devices["cpu"].weights == 0
    assert all(mapped_region(parameter) for parameter in even.parameters())


def test_copies_take_the_budget_to_its_last_byte_and_what_has_no_room_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = small()
    path = written(original, tmp_path)
    planned = get_plan(loaded(path, {"": "disk"})).devices["cpu"].total
    caplog.clear()
    model = loaded(path, {"": "disk"}, max_memory={"cpu": planned})
    assert get_plan(model).devices["cpu"].free == 0
    assert not any(mapped_region(parameter) for parameter in model.parameters())
    assert not caplog.messages
    model = loaded(path, {"": "disk"}, max_memory={"cpu": planned - 1})
    assert get_plan(model).devices["cpu"].free >= 0  # type: ignore[operator]
    (left,) = [name for name, parameter in model.named_parameters() if mapped_region(parameter)]
    (message,) = caplog.messages
    assert message.startswith(f"{left} and 0 other weights on disk do not begin at multiples of 16 bytes")


def test_undispatched_weights_view_their_file_again_with_what_was_written(tmp_path: Path) -> None:
    original = small()
    model = loaded(written(original, tmp_path), {"": "disk"})
    weight = model[0].weight
    with torch.no_grad():
        weight[0] = 3
    undispatch(model)
    assert model[0].weight is weight
    assert all(mapped_region(parameter) for parameter in model.parameters())
    assert bool((weight[0] == 3).all())
    assert torch.equal(weight[1:], original[0].weight[1:])
    assert get_plan(dispatch_model(model, {"": "disk"})).devices["cpu"].weights == nbytes(original)


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_model_that_is_loaded_in_inference_mode_runs_in_and_outside_of_it(tmp_path: Path, device: str) -> None:
    original, x = small(), torch.randn(1, 67)
    with torch.inference_mode():
        model = loaded(written(original, tmp_path), {"": device})
        assert torch.equal(model(x), original(x))
    with torch.no_grad():
        assert torch.equal(model(x.clone()), original(x.clone()))
    undispatch(model)
    assert torch.equal(model[0].weight, original[0].weight)


def test_a_model_that_cannot_be_dispatched_keeps_its_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = undispatch(loaded(written(small(), tmp_path), {"": "disk"}))
    monkeypatch.setattr(Builder, "_read_ahead", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dispatch_model(model, {"": "disk"})
    assert all(mapped_region(parameter) for parameter in model.parameters())


def test_weights_that_are_streamed_or_looked_up_stay_where_they_are(tmp_path: Path) -> None:
    model = loaded(written(small(), tmp_path), {"": "disk"}, main_device=0)
    assert all(mapped_region(parameter) for parameter in model.parameters())
    table = nn.Sequential(nn.Embedding(8, 4))
    load_checkpoint_and_dispatch(table, written(table, tmp_path), device_map={"": "disk"})
    assert mapped_region(table[0].weight) is not None


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.embed(ids))
            return found

    path = written(nn.ModuleDict({"embed": nn.Embedding(16, 8)}), tmp_path)
    model = load_checkpoint_and_dispatch(Tied(), path, device_map={"": "cpu"})
    assert model.head.weight is model.embed.weight
    assert is_aligned(model.head.weight)
