"""DVCLive: metrics, parameters and plots in a folder that DVC displays."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from bigmodel.errors import TrainError

from ..base import LibraryTracker, as_number, flat, image_names, is_number, on_main_process

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif")


class DVCLiveTracker(LibraryTracker):
    """Logs to a `dvclive.Live` object.

    Args:
        run_name: not used; the folder is `dir`.
        live: an existing object, used instead of a new one.
        kwargs: those of `dvclive.Live`.
    """

    name = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.run = live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters."""
        self.run.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and strings, also in nested dicts, as metrics. Each call ends one step.

        Further arguments are those of `dvclive.Live.log_metric`.
        """
        if step is not None:
            self.run.step = step
        for name, value in flat(values).items():
            self.run.log_metric(name, as_number(value) if is_number(value) else str(value), **kwargs)
        self.run.next_step()

    def _begin(self) -> Any:
        from dvclive import Live

        return Live(**self._kwargs) if self.run is None else self.run

    def _end(self) -> None:
        self.run.end()

    def _store_images(self, name: str, images: Any, step: int | None, options: dict[str, Any]) -> None:
        """Images are arrays of shape (H, W, 3), PIL images or figures; a name without a suffix gets ".png"."""
        if step is not None:
            self.run.step = step
        suffix = PurePath(name).suffix if name.lower().endswith(_IMAGE_SUFFIXES) else ""
        for key, image in image_names(name.removesuffix(suffix), images, "/"):
            self.run.log_image(key + (suffix or ".png"), image, **options)

    def _store_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, options: dict[str, Any]
    ) -> None:
        raise TrainError(
            f"dvclive has no tables, so {name!r} cannot be logged; log its numbers, or use another tracker"
        )
