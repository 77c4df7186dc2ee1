"""Functions of ``accelerate.utils.modeling``: what they return of models, maps, hooks and precisions."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from bigmodel.compat import modeling
from bigmodel.compat.big_modeling import dispatch_model
from bigmodel.dispatch import undispatch
from bigmodel.errors import DeviceMapError
from bigmodel.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module
from bigmodel.profile import compute_module_sizes
from bigmodel.train import Accelerator, AutocastKwargs
from tests.train.new_states import new_states as new_states

from ..accelerators import at


def tied() -> nn.Module:
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.head = nn.Linear(4, 4, bias=False)
    model.head.weight = model.body[0].weight
    return model


def test_devices_are_one_if_their_index_is_left_out() -> None:
    cpu, meta, first, second = map(torch.device, ("cpu", "meta", "cuda:0", "cuda:1"))
    assert modeling.check_device_same(cpu, cpu)
    assert modeling.check_device_same(meta, meta)
    assert modeling.check_device_same(torch.device("cuda"), first)
    assert not modeling.check_device_same(torch.device("cuda"), second)
    assert not modeling.check_device_same(cpu, meta)


def test_names_without_others_in_them_are_leaves() -> None:
    model = tied()
    names = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight"]
    assert sorted(modeling.get_module_leaves(compute_module_sizes(model))) == sorted(names)
    assert modeling.get_module_leaves({"": 3, "a": 3, "a.b": 2, "a.c": 1, "d": 0}) == ["a.b", "a.c", "d"]


def test_a_module_is_sized_with_those_that_share_its_parameters() -> None:
    model = tied()
    sizes = compute_module_sizes(model)
    rest = [("head", model.head)]
    size, names, modules = modeling.get_module_size_with_ties(["head.weight"], sizes["body"], sizes, rest)
    assert (size, names, modules) == (sizes["body"], ["head"], [model.head])


def test_tied_parameters_on_several_devices_are_warned_of() -> None:
    groups = [["body.0.weight", "head.weight"]]
    with pytest.warns(UserWarning, match="tied parameters are on different devices"):
        modeling.check_tied_parameters_on_same_device(groups, {"body": 0, "head": "cpu"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        modeling.check_tied_parameters_on_same_device(groups, {"": 0})
    with pytest.raises(DeviceMapError, match=r"no device to head\.weight"):
        modeling.check_tied_parameters_on_same_device(groups, {"body": 0})


def test_only_models_of_transformers_say_that_they_tie() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    for ties in (True, False):
        config = transformers.LlamaConfig(vocab_size=8, tie_word_embeddings=ties, **sizes)
        assert modeling.check_tied_parameters_in_config(transformers.LlamaForCausalLM(config)) is ties
        assert not modeling.check_tied_parameters_in_config(transformers.LlamaModel(config))  # it has no head
    assert not modeling.check_tied_parameters_in_config(tied())


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 2)


@pytest.mark.usefixtures("accelerators")
class TestPlaces:
    """Where the parameters of a module are within `align_module_device`, and afterwards."""

    def test_a_module_without_hook_goes_where_it_is_told(self, layer: nn.Linear) -> None:
        weight = layer.weight
        with modeling.align_module_device(layer):
            assert layer.weight is weight
        with modeling.align_module_device(layer, at(0)):
            assert str(layer.weight.device) == at(0)
            with torch.no_grad():
                layer.weight.fill_(3)
        assert layer.weight is weight
        assert layer.weight.eq(3).all()

    def test_a_hook_that_offloads_brings_its_weights(self, layer: nn.Linear) -> None:
        add_hook_to_module(layer, AlignDevicesHook(at(0), offload=True))
        assert modeling.has_offloaded_params(layer)
        with modeling.align_module_device(layer):
            assert str(layer.weight.device) == at(0)
        assert layer.weight.device.type == "cpu"

    def test_a_hook_that_does_not_is_as_none(self, layer: nn.Linear) -> None:
        add_hook_to_module(layer, AlignDevicesHook(at(0)))
        assert not modeling.has_offloaded_params(layer)
        with modeling.align_module_device(layer, "cpu"):
            assert layer.weight.device.type == "cpu"
        assert str(layer.weight.device) == at(0)

    def test_a_chain_offloads_if_one_of_its_hooks_does(self, layer: nn.Linear) -> None:
        add_hook_to_module(layer, SequentialHook(AlignDevicesHook(at(0)), AlignDevicesHook(at(0), offload=True)))
        assert modeling.has_offloaded_params(layer)

    def test_a_dispatched_module_brings_its_weights(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        dispatch_model(model, {"0": "cpu", "1": 0}, main_device=0)
        with modeling.align_module_device(model[0]):
            assert str(model[0].weight.device) == at(0)
        whole = modeling.get_state_dict_offloaded_model(model)
        assert all(value.device.type == "cpu" and torch.equal(value, state[name]) for name, value in whole.items())
        names = dict.fromkeys(("0.weight", "0.bias", "other"))
        found = modeling.get_state_dict_from_offload(model[0], "0.weight", dict(names))
        assert torch.equal(found["0.weight"], state["0.weight"])
        assert found["other"] is None
        undispatch(model)


def test_autocast_is_that_of_the_precision() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    product = torch.ones(2, 2)
    with modeling.get_mixed_precision_context_manager(native_amp=False):
        assert (product @ product).dtype == torch.float32
    with modeling.get_mixed_precision_context_manager(native_amp=True):
        assert (product @ product).dtype == torch.bfloat16
    off = AutocastKwargs(enabled=False)
    with modeling.get_mixed_precision_context_manager(native_amp=True, autocast_kwargs=off):
        assert (product @ product).dtype == torch.float32


def test_scalers_take_their_arguments() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    assert isinstance(modeling.get_grad_scaler("FSDP"), ShardedGradScaler)
    Accelerator(cpu=True)
    assert modeling.get_grad_scaler(init_scale=8.0).get_scale() == 8.0
