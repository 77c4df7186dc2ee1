"""Trackio: runs in a local database, shown by `trackio show`."""

from __future__ import annotations

from typing import Any

from .base import GeneralTracker, flat, on_main_process, table_rows


class TrackioTracker(GeneralTracker):
    """Logs to a run of trackio.

    Args:
        run_name: the project.
        kwargs: arguments of `trackio.init`.
    """

    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The trackio run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import trackio

        self.run = trackio.init(**{"project": self.run_name, **self._kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.run.config.update(flat(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values."""
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images by name: arrays of shape (H, W, 3), PIL images or paths."""
        import trackio

        for name, images in values.items():
            for number, image in enumerate(images):
                key = name if len(images) == 1 else f"{name}/{number}"
                self.run.log({key: trackio.Image(image, **kwargs)}, step=step)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table."""
        import trackio

        names, rows = table_rows(columns, data, dataframe)
        self.run.log({table_name: trackio.Table(columns=names, data=rows)}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
