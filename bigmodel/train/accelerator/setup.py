"""Reading the constructor's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigmodel.errors import TrainError
from bigmodel.train import environment
from bigmodel.train.configuration import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from bigmodel.train.handlers import KwargsHandler
from bigmodel.train.types import RNGType


def by_class(handlers: Sequence[KwargsHandler] | None) -> dict[type, Any]:
    """Return the handlers by class. Raises TrainError for something else, or two of one class."""
    result: dict[type, Any] = {}
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise TrainError(f"kwargs_handlers holds {handler!r}, which is not one of the ...Kwargs dataclasses")
        if type(handler) in result:
            raise TrainError(f"kwargs_handlers holds two {type(handler).__name__}; give one")
        result[type(handler)] = handler
    return result


def accumulation_plugin(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """Return how gradients accumulate. Raises TrainError when it is said twice."""
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=environment.integer(environment.GRADIENT_ACCUMULATION_STEPS, steps))
    if steps != 1:
        raise TrainError("give either gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    plugin.num_steps = plugin.num_steps or 1
    return plugin


def loader_configuration(
    configuration: DataLoaderConfiguration | None, split_batches: bool | None
) -> DataLoaderConfiguration:
    """Return how data loaders are prepared; `split_batches` is the argument of old."""
    configuration = configuration or DataLoaderConfiguration()
    if split_batches is not None:
        configuration.split_batches = split_batches
    if configuration.data_seed is not None and not configuration.use_seedable_sampler:
        raise TrainError("data_seed is used by the seedable sampler; set use_seedable_sampler=True, too")
    return configuration


def project_configuration(configuration: ProjectConfiguration | None, project_dir: Any) -> ProjectConfiguration:
    """Return where the project writes."""
    configuration = configuration or ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and configuration.project_dir is None:
        configuration.set_directories(project_dir)
    return configuration


def dynamo(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return how models are compiled. Raises TrainError when it is said twice."""
    if plugin is not None and backend is not None:
        raise TrainError("give either dynamo_backend or dynamo_plugin, not both")
    return plugin or TorchDynamoPlugin(backend=None if backend is None else str(backend))


def rng_types(names: Sequence[Any] | None) -> list[RNGType]:
    """Return the generators to synchronise; by default the loaders' own. Raises TrainError on unknown names."""
    if names is None:
        return [RNGType.GENERATOR]
    unknown = [name for name in names if str(name) not in RNGType.list()]
    if unknown:
        raise TrainError(f"unknown generator type {unknown[0]!r} in rng_types; choose among {RNGType.list()}")
    return [RNGType(str(name)) for name in names]


def one_deepspeed(plugin: Any, plugins: Any) -> Any:
    """Return the DeepSpeed plugin or plugins. Raises TrainError when both arguments are given."""
    if plugin is not None and plugins is not None:
        raise TrainError("give either deepspeed_plugin or deepspeed_plugins, not both")
    return plugin if plugins is None else plugins
