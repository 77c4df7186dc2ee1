from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.checkpoint import mapped_region, save_model
from bigmodel.devices import max_memory_allocated, memory_allocated
from bigmodel.devices.empty import init_empty_weights
from bigmodel.dispatch import load_checkpoint_and_dispatch, undispatch
from bigmodel.errors import CheckpointMismatchError, PlanError

from ..accelerators import at, exact, two
from .models import Stack, ids, stack

pytestmark = pytest.mark.usefixtures("every_accelerator")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = stack()
    model.used += 5
    save_model(model, tmp_path, max_shard_size="1KB")
    return tmp_path


def empty() -> Stack:
    with init_empty_weights():
        model = Stack()
    model.head.weight = model.embed.weight
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "device_map",
    [
        {"": "disk"},
        {"": "cpu"},
        {"": 0, "blocks": "disk"},
        {"": "disk", "blocks.0": 0, "blocks.2": "cpu"},
        pytest.param({"": 1, "blocks.1": 0}, marks=two),
    ],
)
def test_every_map_gives_the_bits_of_the_saved_model(checkpoint: Path, device_map: dict[str, object]) -> None:
    model = load_checkpoint_and_dispatch(empty(), checkpoint, device_map)
    assert not any(t.is_meta for t in model.state_dict().values())
    computed_on = at(0) if 0 in device_map.values() else "cpu"
    assert torch.equal(model(ids()), stack().to(computed_on)(ids().to(computed_on)).cpu())
    assert model.used.item() == 6
    assert model.head.weight is model.embed.weight or device_map.get("head") is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), stack().get_parameter(name)), name


def test_weights_on_disk_are_views_of_the_checkpoint_itself(checkpoint: Path) -> None:
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    model = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk"}, main_device=0)
    for parameter in model.parameters():
        region = mapped_region(parameter)
        assert region is not None
        assert region.path.parent == checkpoint
    model(ids())
    with torch.no_grad():
        model.scale.add_(1)  # written to memory of this process, never to the file
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before


@pytest.mark.slow
def test_state_read_from_the_checkpoint_is_kept_when_written(checkpoint: Path) -> None:
    model = load_checkpoint_and_dispatch(empty().train(), checkpoint, {"": "disk"}, main_device=0, offload_buffers=True)
    for _ in range(3):
        model(ids())
    assert model.norm.num_batches_tracked.item() == 3
    assert model.used.item() == 8


@pytest.mark.slow
@pytest.mark.parametrize("main_device", ["cpu", 0])
@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu"}, {"": "disk", "blocks.1": "cpu"}])
def test_a_dtype_is_what_runs_wherever_the_weights_lie(
    checkpoint: Path, main_device: object, device_map: object
) -> None:
    expected = undispatch(load_checkpoint_and_dispatch(empty(), checkpoint, {"": "cpu"})).bfloat16()(ids())
    model = load_checkpoint_and_dispatch(empty(), checkpoint, device_map, dtype=torch.bfloat16, main_device=main_device)
    output = model(ids())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)


@pytest.mark.slow
@exact
def test_a_planned_load_keeps_to_the_budgets(checkpoint: Path) -> None:
    weights = sum(p.nbytes for p in stack().parameters())
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, "auto", max_memory={0: 3 * weights // 4, "cpu": weights // 4}
    )
    assert max_memory_allocated(0) <= 3 * weights // 4
    assert torch.equal(model(ids()), stack()(ids()))


@exact
def test_a_bad_checkpoint_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    save_model(nn.Linear(2, 2), tmp_path)
    model = empty()
    with pytest.raises(CheckpointMismatchError, match="scale"):
        load_checkpoint_and_dispatch(model, tmp_path, {"": 0})
    assert all(p.is_meta for p in model.parameters())
    assert memory_allocated(0) == 0


def test_without_a_map_it_only_loads(checkpoint: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), checkpoint)
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(model(ids()), stack()(ids()))


@pytest.mark.parametrize("dtype", ["float99", "int4", 16])
def test_a_dtype_that_is_none_is_refused(checkpoint: Path, dtype: str) -> None:
    with pytest.raises(PlanError, match="dtype"):
        load_checkpoint_and_dispatch(empty(), checkpoint, {"": "cpu"}, dtype=dtype)
