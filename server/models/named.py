"""The models and adapters that a command names: their names for clients, and that they are there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from bigmodel.errors import ServeError
from bigmodel.plan import STRATEGIES
from bigmodel.server.loading import LoadOptions, PlannedModel, display_name
from bigmodel.sources.resolve import open_source


def named_models(given: Iterable[str]) -> dict[str, str]:
    """Folders and Hub ids by name for clients, of ``MODEL`` or ``NAME=MODEL``. Raises ServeError for one name twice."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, model = text.partition("=")
        if not (name and equals and model) or Path(text).expanduser().exists():
            name, model = display_name(text), text
        if name in found:
            raise ServeError(
                f"two models are called '{name}': {found[name]} and {model}; give one another name, as in OTHER={model}"
            )
        found[name] = model
    return found


def named_adapters(given: Iterable[str]) -> dict[str, str]:
    """Folders of adapters by name for clients, of ``NAME=FOLDER``. Raises ServeError for others, and a name twice."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ServeError(f"--lora: '{text}' is not NAME=FOLDER, as in legal=adapters/legal")
        if name in found:
            raise ServeError(f"two adapters are called '{name}': {found[name]} and {folder}")
        found[name] = folder
    return found


def planned_models(models: Mapping[str, str], options: LoadOptions) -> dict[str, PlannedModel]:
    """Several models by name, each with the same options.

    Raises:
        ServeError: The options place a model without a budget.
        CheckpointError: There is no such model.
    """
    strategy = options.get("device_map", "auto")
    if strategy not in STRATEGIES:
        raise ServeError(
            f"device map '{strategy}' has no budget, which several models share; use one of {', '.join(STRATEGIES)}"
        )
    for model in models.values():
        source = open_source(model, options.get("revision"))
        source.config_dict()
        source.weight_files()
    return {name: PlannedModel(model, options) for name, model in models.items()}
