"""The constructor's arguments, read."""

from __future__ import annotations

import pytest

from bigmodel.errors import TrainError
from bigmodel.train import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)
from bigmodel.train.accelerator import setup


def test_handlers_are_found_by_their_class() -> None:
    autocast, scaler = AutocastKwargs(), GradScalerKwargs()
    assert setup.by_class([autocast, scaler]) == {AutocastKwargs: autocast, GradScalerKwargs: scaler}
    assert setup.by_class(None) == {}


def test_the_launcher_s_number_of_steps_wins_over_the_argument_but_not_over_a_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert setup.accumulation_plugin(3, None).num_steps == 3
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    assert setup.accumulation_plugin(3, None).num_steps == 5
    plugin = GradientAccumulationPlugin(num_steps=2)
    assert setup.accumulation_plugin(1, plugin) is plugin
    assert setup.accumulation_plugin(1, GradientAccumulationPlugin()).num_steps == 1


def test_the_argument_of_old_is_put_in_its_place() -> None:
    assert setup.loader_configuration(None, True).split_batches
    given = DataLoaderConfiguration(split_batches=True)
    assert setup.loader_configuration(given, None) is given


def test_a_project_s_own_folder_wins_over_the_argument() -> None:
    own = ProjectConfiguration("own")
    assert setup.project_configuration(own, "other").project_dir == "own"
    assert setup.project_configuration(ProjectConfiguration(), "other").project_dir == "other"


def test_generators_are_known_by_name() -> None:
    assert setup.rng_types(None) == [RNGType.GENERATOR]
    assert setup.rng_types(["torch", RNGType.CUDA]) == [RNGType.TORCH, RNGType.CUDA]


def test_compilation_is_said_once() -> None:
    assert setup.dynamo("eager", None).backend == "eager"
    plugin = TorchDynamoPlugin(backend="inductor")
    assert setup.dynamo(None, plugin) is plugin
    with pytest.raises(TrainError, match="not both"):
        setup.dynamo("eager", plugin)
