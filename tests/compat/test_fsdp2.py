"""The steps by which accelerate shards a model with FSDP2, taken one by one."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bigmodel import Accelerator, FullyShardedDataParallelPlugin
from bigmodel.errors import TrainError
from bigmodel.utils import fsdp2_apply_ac, fsdp2_load_full_state_dict, fsdp2_prepare_model
from bigmodel.utils import fsdp2_switch_optimizer_parameters as switch
from bigmodel.utils.fsdp_utils import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    fsdp2_prepare_auto_wrap_policy,
    get_fsdp2_grad_scaler,
    get_parameters_from_modules,
)
from tests.train.multiprocess import run_on_ranks
from tests.train.new_states import new_states as new_states


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.inner(rows))
        return result


def step_by_step() -> None:
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Sequential"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = Net()
    given = {name: value.clone() for name, value in model.state_dict().items()}
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert policy is not None
    assert [policy(module) for module in model.children()] == [True, False]
    fsdp2_apply_ac(accelerator, model)
    assert "inner._checkpoint_wrapped_module" in dict(model.named_modules())
    assert isinstance(fsdp2_prepare_model(accelerator, model), FSDPModule)
    assert fsdp2_prepare_model(accelerator, model) is model
    names = dict(zip(model.state_dict(), given, strict=True))
    twice = {name: 2 * given[old] for name, old in names.items()} if accelerator.is_main_process else {}
    fsdp2_load_full_state_dict(accelerator, model, twice)
    for name, part in model.state_dict().items():
        whole = part.full_tensor()
        if accelerator.is_main_process:
            assert torch.equal(whole, 2 * given[names[name]])


@pytest.mark.slow
def test_a_model_is_wrapped_sharded_and_filled_on_two_ranks() -> None:
    run_on_ranks(step_by_step)


def test_a_run_without_fsdp_is_refused() -> None:
    with pytest.raises(TrainError, match="no FSDP plugin"):
        fsdp2_prepare_model(Accelerator(cpu=True), nn.Linear(1, 1))


def test_an_optimizer_steps_the_parameters_that_it_is_given() -> None:
    old, new = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([old], lr=1)
    with pytest.raises(KeyError, match="would not be trained"):
        switch(optimizer, {})
    switch(optimizer, {old.data_ptr: new})
    assert optimizer.param_groups[0]["params"][0] is new


def test_transformers_is_told_which_rank_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    enable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("True", "True")
    disable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("True", "False")


def test_a_scaler_takes_its_arguments() -> None:
    assert get_fsdp2_grad_scaler(device="cpu", init_scale=4.0).get_scale() == 4.0


def test_parameters_of_modules_are_found_by_name() -> None:
    net = Net()
    assert get_parameters_from_modules("inner", net, "cpu") == set(net.inner.parameters())
    assert get_parameters_from_modules(r"inner\.\d|head", net, "cpu") == set(net.parameters())
    assert get_parameters_from_modules([net.head], net, "cpu") == set(net.head.parameters())
    assert get_parameters_from_modules(None, net, "cpu") == set()
