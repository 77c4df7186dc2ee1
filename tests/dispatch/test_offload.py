from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.checkpoint import mapped_region
from bigmodel.dispatch import cpu_offload, cpu_offload_with_hook, disk_offload, undispatch
from bigmodel.errors import DispatchError

from ..accelerators import at, held, two
from .models import ids, llama, resident_output, stack

pytestmark = pytest.mark.usefixtures("every_accelerator")


def test_cpu_offload_streams_every_weight() -> None:
    model = cpu_offload(stack(), execution_device=at(0))
    assert torch.equal(model(ids()), resident_output(stack(), ids()))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert str(model.norm.running_mean.device) == at(0)


@two
def test_without_a_device_the_model_runs_where_it_lies() -> None:
    model = cpu_offload(stack())
    assert not any("forward" in m.__dict__ for m in model.modules())
    model = cpu_offload(stack().to(at(1)))
    assert torch.equal(model(ids()), resident_output(stack(), ids()))
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_weights_for_a_model_on_meta_may_be_given() -> None:
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    full = nn.Linear(3, 2)
    model = cpu_offload(empty, execution_device=at(0), state_dict=full.state_dict())
    assert torch.equal(model(torch.ones(1, 3)), resident_output(full, torch.ones(1, 3)))


def test_disk_offload_moves_the_weights_to_a_file_and_back(tmp_path: Path) -> None:
    model = disk_offload(stack(), tmp_path, execution_device=at(0))
    assert all(mapped_region(p) is not None for p in model.parameters())
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(ids()), resident_output(stack(), ids()))
    undispatch(model, "cpu")
    assert torch.equal(model(ids()), stack()(ids()))


def test_a_folder_used_before_never_lends_its_weights(tmp_path: Path) -> None:
    first = disk_offload(stack(seed=1), tmp_path, execution_device=at(0))
    second = disk_offload(stack(seed=2), tmp_path, execution_device=at(0))
    assert torch.equal(first(ids()), resident_output(stack(seed=1), ids()))
    assert torch.equal(second(ids()), resident_output(stack(seed=2), ids()))
    assert list(tmp_path.iterdir()) == []


def test_models_of_a_pipeline_take_turns_on_the_device() -> None:
    first, hook = cpu_offload_with_hook(stack(seed=1), execution_device=at(0))
    second, second_hook = cpu_offload_with_hook(stack(seed=2), execution_device=at(0), prev_module_hook=hook)
    assert held(0) == 0
    first_output = first(ids())
    before = held(0)
    second_output = second(ids())
    assert before > 0
    assert {p.device.type for p in first.parameters()} == {"cpu"}
    assert {str(p.device) for p in second.parameters()} == {at(0)}
    second_hook.offload()
    assert {p.device.type for p in second.parameters()} == {"cpu"}
    assert second.head.weight is second.embed.weight
    assert torch.equal(first_output.cpu(), resident_output(stack(seed=1), ids()))
    assert torch.equal(second_output.cpu(), resident_output(stack(seed=2), ids()))
    hook.remove()
    assert torch.equal(first(ids()), stack(seed=1).eval()(ids()))
    assert "forward" not in first.__dict__


def test_a_module_without_parameters_can_be_hooked() -> None:
    model, hook = cpu_offload_with_hook(nn.ReLU(), execution_device=at(0))
    assert model(torch.tensor([-1.0, 1.0])).cpu().tolist() == [0, 1]
    with pytest.raises(DispatchError, match="already"):
        cpu_offload_with_hook(model, execution_device=at(0))
    hook.remove()


@pytest.mark.slow
def test_a_language_model_generates_the_same_offloaded(tmp_path: Path) -> None:
    tokens = torch.arange(5).view(1, 5)
    plain = llama().to(at(0)).generate(tokens.to(at(0)), max_new_tokens=3, do_sample=False).cpu()
    assert torch.equal(cpu_offload(llama(), 0).generate(tokens, max_new_tokens=3, do_sample=False), plain)
    assert torch.equal(disk_offload(llama(), tmp_path, 0).generate(tokens, max_new_tokens=3, do_sample=False), plain)


def test_an_optimizer_that_was_built_before_trains_a_model_that_moves_as_a_whole() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, hook = cpu_offload_with_hook(model, at(0))
    model(torch.ones(2, 4)).sum().backward()
    hook.offload()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.1 * torch.full((4, 4), 2.0))
