"""Experiment tracking from the main process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from bigmodel.errors import TrainError
from bigmodel.train.accelerator.base import AcceleratorCore


class Tracking(AcceleratorCore):
    """Starts trackers, logs to all of them, and finishes them."""

    log_with: list[Any]
    trackers: list[Any]
    _unfinished: list[Any]

    def _choose_trackers(self, log_with: Any) -> None:
        self.trackers, self._unfinished = [], []
        self.log_with = []
        if log_with is None:
            return
        from bigmodel.train.tracking import filter_trackers

        names = log_with if isinstance(log_with, (list, tuple)) else [log_with]
        self.log_with = filter_trackers(list(names), self.project_configuration.logging_dir)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with`.

        Args:
            project_name: name of the project in the trackers.
            config: hyperparameters to log.
            init_kwargs: arguments for each tracker, by its name: {"wandb": {"tags": [...]}}.
        """
        if not self.log_with:
            return
        from bigmodel.train.tracking.registry import start_trackers

        self.trackers = start_trackers(
            self.log_with, project_name, self.project_configuration.logging_dir, config, init_kwargs or {}
        )
        self._unfinished = list(self.trackers)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker `name`, or with `unwrap` the library's own object in it.

        On processes that do not log, returns an object that does nothing.

        Raises:
            TrainError: no such tracker was started.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self.is_main_process and any(str(name) == str(getattr(item, "name", item)) for item in self.log_with):
            from bigmodel.train.tracking import GeneralTracker

            return GeneralTracker(_blank=True)
        raise TrainError(f"no tracker {name!r} was started; there are {[tracker.name for tracker in self.trackers]}")

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Log values to every tracker, on the processes that log.

        Args:
            values: numbers, strings or dicts of numbers by name.
            step: the step they belong to.
            log_kwargs: further arguments for each tracker's `log`, by its name.
        """
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Finish all trackers, even if one fails, and leave the process group. `get_tracker` still returns them."""
        with ExitStack() as last_first:
            last_first.callback(self.state.destroy_process_group)
            while self._unfinished:
                last_first.callback(self._unfinished.pop().finish)
