"""Trackio: runs in a local database, displayed by `trackio show`."""

from __future__ import annotations

from typing import Any

from .base import LibraryTracker, flat, image_names, on_main_process


class TrackioTracker(LibraryTracker):
    """Logs to a trackio run. Further arguments are those of `trackio.init`."""

    name = "trackio"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters."""
        self.run.config.update(flat(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values."""
        self.run.log(values, step=step, **kwargs)

    def _begin(self) -> Any:
        import trackio

        return trackio.init(**{"project": self.run_name, **self._kwargs})

    def _store_images(self, name: str, images: Any, step: int | None, options: dict[str, Any]) -> None:
        """Images are arrays of shape (H, W, 3), PIL images or paths."""
        import trackio

        for key, image in image_names(name, images, "/"):
            self.run.log({key: trackio.Image(image, **options)}, step=step)

    def _store_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, options: dict[str, Any]
    ) -> None:
        import trackio

        self.run.log({name: trackio.Table(columns=columns, data=rows)}, step=step, **options)
