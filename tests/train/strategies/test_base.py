"""Default strategy behaviour for one process, and lazy import of the chosen strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from bigmodel.train.precision.scaling import LossScaler
from bigmodel.train.strategies.base import PARALLELISM_CONFIG, PLUGINS, STRATEGIES, Strategy, StrategySettings, load
from bigmodel.train.types import DistributedType


class Plain(Strategy):
    """Overrides what must be."""

    def prepare_model(self, model: nn.Module, *, device_placement: bool, evaluation_mode: bool) -> nn.Module:
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def save_model(self, *args: Any, **kwargs: Any) -> None: ...

    load_model = save_optimizer = load_optimizer = save_model


def plain(process_index: int = 0) -> Plain:
    return Plain(StrategySettings(torch.device("cpu"), num_processes=3, process_index=process_index))


def test_a_step_is_made_with_or_without_a_scaler() -> None:
    for scaler in (None, LossScaler(torch.amp.GradScaler("cpu", init_scale=8.0))):
        parameter = nn.Parameter(torch.tensor(1.0))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        plain().backward(parameter * 0.25, scaler)
        assert plain().optimizer_step(optimizer, scaler)
        assert parameter.item() == 0.75
        plain().zero_grad(optimizer)
        assert parameter.grad is None


def test_a_closure_is_called_by_the_step() -> None:
    parameter = nn.Parameter(torch.tensor(1.0))
    calls = []
    plain().optimizer_step(torch.optim.SGD([parameter], lr=1.0), closure=lambda: calls.append(1) or 0.0)
    assert calls == [1]


def test_every_process_reads_its_own_data_and_the_first_writes() -> None:
    assert plain(2).data_parallel() == (3, 2)
    assert (plain(0).should_save_model, plain(2).should_save_model) == (True, False)
    assert plain().keeps_whole_models
    assert plain().prepare_together([nn.Linear(1, 1)], [True]) == {}
    assert list(plain().state_dict(nn.Linear(1, 1))) == ["weight", "bias"]


def test_contexts_that_matter_only_to_several_processes_do_nothing() -> None:
    model = nn.Linear(1, 1)
    with plain().no_sync(model), plain().trigger_sync_in_backward(model), plain().join([model]):
        model(torch.ones(1, 1)).backward()
    assert model.weight.grad is not None


class Gathering(Plain):
    """Whose ranks hold parts of the weights."""

    def gathered_weights(self, model: nn.Module) -> dict[str, Any]:
        return {"whole": torch.ones(2)} if self.settings.process_index == 0 else {}


def test_gathered_weights_are_written_by_the_rank_that_has_them(tmp_path: Path) -> None:
    for index in (0, 2):
        strategy = Gathering(StrategySettings(torch.device("cpu"), num_processes=3, process_index=index))
        assert list(strategy.state_dict(nn.Linear(1, 1))) == (["whole"] if index == 0 else [])
        strategy.export_model(nn.Linear(1, 1), tmp_path / str(index), "1GB", writes=index == 2)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert load_file(tmp_path / "0" / "model.safetensors").keys() == {"whole"}


def test_weights_that_every_rank_has_are_written_where_asked(tmp_path: Path) -> None:
    plain(2).export_model(nn.Linear(1, 1), tmp_path / "asked", "1GB")
    plain(2).export_model(nn.Linear(1, 1), tmp_path / "not", "1GB", writes=False)
    assert [path.name for path in tmp_path.iterdir()] == ["asked"]
    assert load_file(tmp_path / "asked" / "model.safetensors").keys() == {"weight", "bias"}


def test_every_kind_in_use_has_a_strategy_that_knows_its_kind() -> None:
    assert {kind.value for kind in STRATEGIES} == {"NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP", "TP"}
    for kind, name in STRATEGIES.items():
        cls = load(name)
        assert issubclass(cls, Strategy)
        assert cls.distributed_type in (kind, DistributedType.MULTI_GPU)


def test_plugins_can_be_made_without_arguments() -> None:
    for name in (*PLUGINS.values(), PARALLELISM_CONFIG):
        assert load(name)()
