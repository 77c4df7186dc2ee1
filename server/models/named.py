"""The models and adapters that a command names: their names for clients, and that they are there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from bigmodel.errors import ServeError
from bigmodel.plan import STRATEGIES
from bigmodel.server.adapters.files import base_model
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


def named_adapters(given: Iterable[str], models: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Folders of adapters by name for clients, for each model that has any.

    Args:
        given: ``NAME=FOLDER`` or ``MODEL:NAME=FOLDER``, with the name of a model for clients. Of several models, the
            first form is for an adapter whose own settings name exactly one of them.
        models: Folders and Hub ids by name, as :func:`named_models` returns them.

    Raises:
        ServeError: A text is none of these forms, does not say whose adapter it is, or a name occurs twice.
    """
    found: dict[str, dict[str, str]] = {}
    folders: dict[str, str] = {}
    for text in given:
        # A model's name may hold colons itself: the longest one that is there is meant.
        model = max((name for name in models if text.startswith(f"{name}:")), key=len, default=None)
        name, equals, folder = (text if model is None else text[len(model) + 1 :]).partition("=")
        if not (name and equals and folder):
            raise ServeError(f"--lora: '{text}' is not NAME=FOLDER or MODEL:NAME=FOLDER, as in legal=adapters/legal")
        if name in folders:
            raise ServeError(f"two adapters are called '{name}': {folders[name]} and {folder}")
        if name in models:
            raise ServeError(f"an adapter is called '{name}' as a model is; give it another name")
        folders[name] = folder
        found.setdefault(_model_of(text, name, folder, models) if model is None else model, {})[name] = folder
    return found


def adapter_folders(given: Iterable[str]) -> dict[str, str]:
    """Folders of adapters by name, of ``FOLDER``, whose name is then the adapter's, or ``NAME=FOLDER``.

    Raises ServeError for one name twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder) or Path(text).expanduser().exists():
            name, folder = Path(text).expanduser().resolve().name, text
        if name in found:
            raise ServeError(f"two adapters are called '{name}': {found[name]} and {folder}; write OTHER={folder}")
        found[name] = folder
    return found


def _model_of(text: str, name: str, folder: str, models: Mapping[str, str]) -> str:
    """The model that an adapter without one belongs to: the only one, or that which the adapter was trained for."""
    if len(models) == 1:
        return next(iter(models))
    base = base_model(name, folder)
    fitting = [] if base is None else [model for model, source in models.items() if _same_source(base, source)]
    if len(fitting) != 1:
        raise ServeError(
            f"--lora: '{text}' does not say which model's adapter it is; write MODEL:NAME=FOLDER, with one of "
            f"{', '.join(models)} as MODEL"
        )
    return fitting[0]


def _same_source(one: str, other: str) -> bool:
    paths = [Path(text).expanduser() for text in (one, other)]
    return one == other or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))


def planned_models(
    models: Mapping[str, str], options: LoadOptions, adapters: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, PlannedModel]:
    """Several models by name, each with the same options, and with its own of the ``adapters``: folders by name.

    Raises:
        ServeError: The options place a model without a budget, or an adapter is not served or is another model's.
        CheckpointError: There is no such model, or a file of an adapter is damaged.
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
    own = adapters or {}
    return {name: PlannedModel(model, options, own.get(name)) for name, model in models.items()}
