import threading

import pytest
import torch
from torch import nn

from bigmodel.devices import empty
from bigmodel.devices.empty import init_empty_weights, init_on_device

from ..dispatch.guarded import OwnedLock


def test_parameters_go_to_meta_and_buffers_stay() -> None:
    with init_empty_weights():
        model = nn.BatchNorm1d(3)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert not nn.Linear(1, 1).weight.is_meta


def test_buffers_go_too_when_asked() -> None:
    with init_empty_weights(include_buffers=True):
        model = nn.BatchNorm1d(3)
    assert all(t.is_meta for t in model.state_dict().values())


def test_another_thread_is_not_concerned() -> None:
    built: list[nn.Linear] = []
    with init_empty_weights():
        other = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        mine = nn.Linear(2, 2)
    assert mine.weight.is_meta
    assert not built[0].weight.is_meta


def test_contexts_nest_and_end_also_when_the_body_raises() -> None:
    original = nn.Module.register_parameter
    with pytest.raises(KeyError), init_empty_weights(), init_on_device("cpu"):
        assert not nn.Linear(1, 1).weight.is_meta
        raise KeyError
    assert nn.Module.register_parameter is original


def test_a_parameter_keeps_its_class_and_attributes() -> None:
    class Tagged(nn.Parameter):
        pass

    module = nn.Module()
    tagged = Tagged(torch.ones(2), requires_grad=False)
    tagged.note = "kept"
    with init_empty_weights():
        module.weight = tagged
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.is_meta
    assert module.weight.note == "kept"
    assert not module.weight.requires_grad


@pytest.mark.usefixtures("accelerators")
def test_modules_can_be_built_on_an_accelerator() -> None:
    with init_on_device("virtual:1"):
        model = nn.Linear(2, 2)
    assert model.weight.device == torch.device("virtual:1")


def test_values_are_written_where_there_are_any_and_nowhere_else() -> None:
    with init_empty_weights():
        layer = nn.Linear(4, 4)
        nn.init.normal_(layer.weight)
        real = torch.zeros(4).normal_().fill_(2).clamp_(max=1)
    assert layer.weight.is_meta
    assert real.tolist() == [1, 1, 1, 1]


def test_patches_of_another_library_go_on_working(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    plain = nn.Module.register_parameter

    def others(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        seen.append(name)
        plain(module, name, param)

    monkeypatch.setattr(nn.Module, "register_parameter", others)
    with init_empty_weights():
        assert nn.Linear(1, 1, bias=False).weight.is_meta
    assert seen == ["weight", "bias"]
    assert nn.Module.register_parameter is others


def test_register_parameter_is_replaced_and_put_back_under_one_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = OwnedLock()
    monkeypatch.setattr(empty, "_lock", lock)
    with init_empty_weights():
        assert lock.entered == 1
    assert lock.entered == 2
