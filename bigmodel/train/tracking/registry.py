"""The registry of trackers: built-in and registered ones, the installed ones, and starting those of `log_with`."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bigmodel.errors import TrainError

from .base import GeneralTracker

_TRACKERS: dict[str, tuple[str | type[GeneralTracker], str, str]] = {
    "tensorboard": ("tensorboard:TensorBoardTracker", "tensorboard", "tensorboard"),
    "wandb": ("wandb:WandBTracker", "wandb", "wandb"),
    "mlflow": ("mlflow:MLflowTracker", "mlflow", "mlflow"),
    "trackio": ("trackio:TrackioTracker", "trackio", "trackio"),
    "comet_ml": ("more.comet:CometMLTracker", "comet_ml", "comet_ml"),
    "aim": ("more.aim:AimTracker", "aim", "aim"),
    "clearml": ("more.clearml:ClearMLTracker", "clearml", "clearml"),
    "dvclive": ("more.dvclive:DVCLiveTracker", "dvclive", "dvclive"),
    "swanlab": ("more.swanlab:SwanLabTracker", "swanlab", "swanlab"),
}
"""By name: the class ("module:class" until its first use), the module that it imports, and the package to install."""


def register_tracker_class(tracker_class: type[GeneralTracker], module: str = "", package: str = "") -> None:
    """Make `tracker_class` available under its name in `log_with`.

    Args:
        tracker_class: the class; its `name` is the name.
        module: module that it imports.
        package: package that provides this module; by default, `module`.
    """
    _TRACKERS[tracker_class.name] = (tracker_class, module, package or module)  # type: ignore[attr-defined]


def available_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    return [name for name, (_, module, _) in _TRACKERS.items() if _is_installed(module)]


def filter_trackers(
    log_with: Sequence[Any], logging_dir: str | Path | None = None
) -> list[str | GeneralTracker | type[GeneralTracker]]:
    """Return the trackers of `log_with`: names, tracker objects or classes, and for "all" every installed one.

    Raises:
        TrainError: a name is unknown (the message names the nearest), a package is not installed (the message names
            it), or a tracker needs a logging directory and there is none.
    """
    chosen: list[Any] = []
    for item in log_with:
        if isinstance(item, GeneralTracker) or (isinstance(item, type) and issubclass(item, GeneralTracker)):
            chosen.append(item)
        elif str(item).lower() == "all":
            names = available_trackers()
            chosen += [name for name in names if logging_dir is not None or not _needs_folder(name)]
        else:
            chosen.append(_checked(str(item).lower(), logging_dir))
    return list(dict.fromkeys(chosen))


def start_trackers(
    log_with: Sequence[Any],
    project_name: str,
    logging_dir: str | Path | None,
    config: dict[str, Any] | None,
    init_kwargs: dict[str, dict[str, Any]],
) -> list[GeneralTracker]:
    """Start the trackers of `log_with` that log on this process, and log `config` to each.

    Args:
        init_kwargs: arguments of each tracker, by its name.
    """
    from bigmodel.train.state.partial import PartialState

    is_main = PartialState().is_main_process
    started: list[GeneralTracker] = []
    for item in log_with:
        kind = _class_of(item) if isinstance(item, str) else item
        if kind.main_process_only and not is_main:
            continue
        tracker = item if isinstance(item, GeneralTracker) else _made(kind, project_name, logging_dir, init_kwargs)
        tracker.start()
        if config is not None:
            tracker.store_init_configuration(config)
        started.append(tracker)
    return started


def _made(
    kind: Any, project_name: str, logging_dir: str | Path | None, init_kwargs: dict[str, dict[str, Any]]
) -> GeneralTracker:
    arguments = init_kwargs.get(str(kind.name), {})
    if kind.requires_logging_directory:
        arguments = {"logging_dir": logging_dir, **arguments}
    return kind(project_name, **arguments)


def _checked(name: str, logging_dir: str | Path | None) -> str:
    if name not in _TRACKERS:
        near = difflib.get_close_matches(name, _TRACKERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_TRACKERS)} and 'all'"
        raise TrainError(f"unknown tracker {name!r}; {hint}")
    _, module, package = _TRACKERS[name]
    if not _is_installed(module):
        raise TrainError(f"the tracker {name!r} needs a package that is not installed: `pip install {package}`")
    if logging_dir is None and _needs_folder(name):
        raise TrainError(f"the tracker {name!r} writes files: give Accelerator a project_dir")
    return name


def _class_of(name: str) -> Any:
    """Return a tracker's class; its module is imported on first use."""
    kind = _TRACKERS[name][0]
    if not isinstance(kind, str):
        return kind
    module, _, attribute = kind.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), attribute)


def _needs_folder(name: str) -> bool:
    return bool(_class_of(name).requires_logging_directory)


def _is_installed(module: str) -> bool:
    return not module or importlib.util.find_spec(module) is not None
